"""The sweep: every cell once, kept as soon as it is done, and readable at any time."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from engine.config import ConfigError
from flows import study
from flows.cli import main
from flows.study import ROW, StudyConfig, cells, interval


@pytest.fixture
def study_file(tmp_path: Path, tiny_student: Path, tiny_teacher: Path) -> Path:
    for name, count in (("prompts", 20), ("evaluation", 4)):
        lines = [f'{{"text": "{name} {i}", "answer": "{i}"}}' for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    path = tmp_path / "study.toml"
    path.write_text(
        f"""
        staleness = [0, 2]
        seeds = 1
        workers = 2
        directory = "{tmp_path}/study"
        [estimators.exact]
        type = "reverse_kl"
        cache = {{ type = "dense" }}
        [run]
        student = {{ model = "{tiny_student}" }}
        teacher = {{ model = "{tiny_teacher}" }}
        prompts = {{ path = "{tmp_path}/prompts.jsonl" }}
        evaluation = {{ path = "{tmp_path}/evaluation.jsonl" }}
        rollout = {{ backend = "hf", max_new_tokens = 6 }}
        training = {{ steps = 3, batch = 2 }}
        """
    )
    return path


def test_a_sweep_writes_table_and_plot_and_a_longer_one_goes_on_where_it_ended(study_file: Path):
    assert main(["study", str(study_file)]) == 0
    path = study_file.parent / "study" / "study.parquet"
    first = pq.read_table(path).to_pylist()
    assert sorted(row["staleness"] for row in first) == [0, 2]
    assert all(row["kl"] > 0 and row["bytes_per_token"] > 100 for row in first)
    assert path.with_suffix(".png").stat().st_size > 10_000

    assert main(["study", str(study_file), "seeds=2", "staleness=[2]"]) == 0
    both = pq.read_table(path).to_pylist()
    assert both[:2] == first, "known cells are not run again"
    assert [(row["staleness"], row["seed"]) for row in both[2:]] == [(2, 1)]


def test_a_change_of_the_run_makes_other_cells(study_file: Path):
    loaded = study.load(study_file, [])
    run = loaded.run
    changed = run | {"training": run["training"] | {"steps": 4}}
    one, other = ({cell.digest for cell in cells(loaded, r)} for r in (run, changed))
    assert len(one) == len(other) == 2 and not one & other


def test_a_mistake_in_a_study_names_file_and_key(study_file: Path, capsys):
    assert main(["study", str(study_file), "estimators.exact.cache.type=dens"]) == 2
    assert "estimators.exact" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no such file"):
        study.load("nowhere.toml", [])
    with pytest.raises(ConfigError, match="stalenes"):
        study.load(study_file, ["stalenes=[1]"])


def test_an_interval_is_students_t():
    assert interval([0.5]) == (0.5, 0.0)
    mean, half = interval([1.0, 2.0, 3.0])
    assert mean == 2.0 and half == pytest.approx(4.30 / 3**0.5)


def test_the_table_shows_every_estimator_at_every_staleness():
    config = StudyConfig.model_validate(
        {"run": {}, "staleness": [0, 8], "estimators": {"a": {"type": "reverse_kl"}}}
    )
    row = dict.fromkeys(ROW.names, 0.0) | {"cell": "", "estimator": "a", "seed": 0}
    rows = [
        row | {"staleness": s, "accuracy": 0.1 * s + 0.05 * seed, "seed": seed}
        for s in (0, 8)
        for seed in (0, 1)
    ]
    console = Console(record=True, width=120)
    study.show(pa.Table.from_pylist(rows, ROW), config, console)
    text = console.export_text()
    assert "0.03±0.32" in text and "0.83±0.32" in text


def test_the_study_that_comes_with_opdflow_is_a_valid_one():
    shipped = study.load(study.DEFAULT, [])
    assert len(shipped.estimators) >= 6 and len(shipped.staleness) >= 7 and shipped.seeds >= 3
