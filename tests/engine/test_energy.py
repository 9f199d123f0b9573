"""Counters of energy, as Linux shows them."""

from pathlib import Path

from engine.energy import Energy


def package(root: Path, index: int, microjoules: int, limit: int = 10**9) -> None:
    zone = root / f"intel-rapl:{index}"
    zone.mkdir(exist_ok=True)
    (zone / "energy_uj").write_text(f"{microjoules}\n")
    (zone / "max_energy_range_uj").write_text(f"{limit}\n")


def test_packages_are_added_up_and_may_run_over(tmp_path: Path):
    package(tmp_path, 0, 5_000_000)
    package(tmp_path, 1, 999_000_000)
    package(tmp_path / "intel-rapl:0", 0, 7)  # a part of a package does not count again
    energy = Energy(tmp_path)
    energy.read()
    assert energy.joules == 0
    package(tmp_path, 0, 8_000_000)
    package(tmp_path, 1, 1_000_000)  # from 999 J over 1000 J to 1 J
    energy.read()
    assert energy.joules == 3 + 2
    package(tmp_path, 0, 9_000_000)
    energy.read()
    assert energy.joules == 6


def test_without_a_counter_that_can_be_read_there_is_no_figure(tmp_path: Path):
    assert Energy(tmp_path).joules is None
    (tmp_path / "intel-rapl:0").mkdir()
    assert Energy(tmp_path).joules is None
