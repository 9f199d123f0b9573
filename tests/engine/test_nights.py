"""The table of nights: which prompts are new, and what is left of a night."""

import subprocess
import sys
from pathlib import Path

import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from engine.nights import NightRunsError, Nights, digest, digest_of
from engine.prompts import Prompt


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(f"id-{text}", text, (1, 2), None, "exact") for text in texts]


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    return Nights(tmp_path, "student")


def test_a_prompt_is_new_until_a_night_has_trained_on_it(nights: Nights) -> None:
    assert nights.fresh(prompts("a", "b")) == prompts("a", "b")
    nights.add({"night": "1"}, prompts("a"))
    assert nights.fresh(prompts("a", "b", "c")) == prompts("b", "c")
    nights.add({"night": "2"}, prompts("c"))
    assert nights.fresh(prompts("a", "b", "c")) == prompts("b")
    assert nights.table()["night"].to_pylist() == ["1", "2"]


def test_a_prompt_is_known_by_its_text_wherever_it_lies(nights: Nights) -> None:
    nights.add({"night": "1"}, prompts("a"))
    moved = Prompt("another id", "a", (7,), "42", "boxed")
    assert nights.fresh([moved, *prompts("b", "b")]) == prompts("b")


def test_models_have_nights_of_their_own(nights: Nights, tmp_path: Path) -> None:
    nights.add({"night": "1"}, prompts("a"))
    assert Nights(tmp_path, "other").fresh(prompts("a")) == prompts("a")


def test_a_digest_of_prompts_does_not_depend_on_their_order() -> None:
    assert digest_of(prompts("a", "b")) == digest_of(prompts("b", "a")) != digest_of(prompts("a"))
    assert digest(prompts("a")[0]) != digest(prompts("b")[0])


def test_the_table_is_exported_as_parquet_and_csv_without_its_digests(
    nights: Nights, tmp_path: Path
) -> None:
    nights.export(f"file://{tmp_path}/bi")  # before the first night, too
    nights.add({"night": "1", "decision": "rejected", "kl_champion": 0.25}, prompts("a"))
    nights.export(f"file://{tmp_path}/bi")
    table = pq.read_table(tmp_path / "bi" / "student.parquet")
    assert "trained" not in table.column_names
    assert table.to_pylist()[0]["kl_champion"] == 0.25
    text = pyarrow.csv.read_csv(tmp_path / "bi" / "student.csv")
    assert text["decision"].to_pylist() == ["rejected"]
    assert {path.name for path in (tmp_path / "bi").iterdir()} == {"student.csv", "student.parquet"}


def test_an_unknown_column_is_an_error(nights: Nights) -> None:
    with pytest.raises(KeyError, match="costs"):
        nights.add({"night": "1", "costs": 3}, [])
    assert nights.table().num_rows == 0


def test_two_nights_of_a_model_do_not_overlap_and_a_dead_one_holds_nothing(
    nights: Nights, tmp_path: Path
) -> None:
    with nights.lock():
        with pytest.raises(NightRunsError, match="student"), Nights(tmp_path, "student").lock():
            pass
        with Nights(tmp_path, "other").lock():
            pass
    script = (
        "import os, signal, sys; from pathlib import Path; from engine.nights import Nights\n"
        "with Nights(Path(sys.argv[1]), 'student').lock(): os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert done.returncode == -9
    with nights.lock():
        pass
