"""Nights in a row, with real Ray, Prefect and MLflow, on the tiny models."""

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlflow
import pyarrow.parquet as pq
import pytest
from prefect.testing.utilities import prefect_test_harness

from engine.config import RunConfig, load
from engine.nights import Nights
from flows.cli import main
from flows.nightly import nightly

BATCH = 8
pytestmark = pytest.mark.timeout(900)  # three nights start three sets of workers


@dataclass
class Story:
    """What three nights and some that had nothing to do left behind."""

    folder: Path
    states: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return Nights(self.folder / "runs", "student").table().to_pylist()

    @property
    def client(self) -> mlflow.MlflowClient:
        mlflow.set_tracking_uri(f"sqlite:///{self.folder}/runs/mlflow.db")
        return mlflow.MlflowClient()


@pytest.fixture(scope="module")
def story(
    tmp_path_factory, ray_session: None, tiny_student: Path, tiny_teacher: Path
) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("nights")
    file = folder / "night.toml"
    file.write_text(
        f"""
        directory = "{folder}/runs"
        student = {{ model = "{tiny_student}" }}
        teacher = {{ model = "{tiny_teacher}" }}
        prompts = {{ path = ["{folder}/one.jsonl", "{folder}/two.jsonl"], growing = true }}
        evaluation = {{ path = "{folder}/evaluation.jsonl" }}
        rollout = {{ backend = "hf", max_new_tokens = 16 }}
        training = {{ steps = 20, batch = {BATCH} }}
        optimizer = {{ lr = 3e-2, warmup_steps = 0 }}
        checkpoint = {{ every = 20 }}
        gate = {{ guards = {{ other = {{ path = "{folder}/other.jsonl", margin = 5.0 }} }} }}
        """
    )
    for name, count in (("evaluation", 48), ("other", 8), ("two", 8)):
        _append(folder / f"{name}.jsonl", name, 0, count)
    os.environ.pop("MLFLOW_TRACKING_URI", None)  # of another test: mlflow.set_tracking_uri sets it
    with prefect_test_harness(server_startup_timeout=120):
        told = Story(folder)
        _tell(told, file)
        yield told


def _tell(story: Story, file: Path) -> None:
    one = story.folder / "one.jsonl"
    _append(one, "add", 0, 4 * BATCH)
    _night(story, "first", load(file))
    _append(one, "add", 4 * BATCH, 2 * BATCH)
    _night(story, "sabotaged", load(file, ["optimizer.lr=100"]))
    _append(one, "add", 6 * BATCH, 1)
    _night(story, "too few", load(file))
    _append(one, "add", 6 * BATCH + 1, 4 * BATCH - 1)
    with one.open("a") as being_written:
        being_written.write('{"text": "half a li')
    _night(story, "teacher away", load(file, ["teacher.model=/nowhere/teacher"]))
    with Nights(story.folder / "runs", "student").lock():
        _night(story, "overlapping", load(file))
    _dead_run(story)
    _night(story, "third", load(file))
    _night(story, "nothing new", load(file))


def _night(story: Story, name: str, config: RunConfig) -> None:
    async def night() -> Any:
        return await nightly(config, return_state=True)

    story.states[name] = asyncio.run(night())
    try:
        found = story.client.get_registered_model("student").aliases
    except mlflow.MlflowException:
        found = {}
    story.aliases[name] = {alias: str(version) for alias, version in found.items()}


def _append(path: Path, name: str, first: int, count: int) -> None:
    with path.open("a") as file:
        for i in range(first, first + count):
            file.write(json.dumps({"text": f"{name} {i}+{i + 1}"}) + "\n")


def _dead_run(story: Story) -> None:
    """As a night leaves it that was killed."""
    experiment = story.client.get_experiment_by_name("opdflow")
    tags = {"opdflow.night": "student", "mlflow.runName": "killed"}
    story.client.create_run(experiment.experiment_id, tags=tags)


def test_each_night_ends_in_a_state_with_its_own_name(story: Story) -> None:
    names = {name: state.name for name, state in story.states.items()}
    assert names == {
        "first": "Promoted",
        "sabotaged": "Rejected",
        "too few": "TooFewPrompts",
        "teacher away": "TeacherAway",
        "overlapping": "Skipped",
        "third": "Promoted",
        "nothing new": "NoNewPrompts",
    }
    assert story.states["teacher away"].is_failed()
    assert "/nowhere/teacher" in story.states["teacher away"].message
    assert "1 new prompts" in story.states["too few"].message


def test_each_night_trains_on_prompts_that_no_other_has_trained_on(story: Story) -> None:
    trained = [set(row["trained"]) for row in story.rows if row["steps"]]
    assert [len(prompts) for prompts in trained] == [5 * BATCH, 2 * BATCH, 4 * BATCH]
    assert len(set.union(*trained)) == 11 * BATCH
    decisions = [row["decision"] for row in story.rows]
    assert decisions == ["promoted", "rejected", "too few prompts", "promoted", "no new prompts"]
    # The 1 that was too few is among the 32 of the night after.
    assert [row["new_prompts"] for row in story.rows] == [40, 16, 1, 32, 0]


def test_the_champion_moves_only_by_promotion_and_the_next_night_starts_from_it(
    story: Story,
) -> None:
    assert story.aliases["first"] == {"champion": "1", "candidate": "1"}
    assert story.aliases["sabotaged"] == {"champion": "1", "candidate": "2"}
    assert story.aliases["third"] == {"champion": "3", "previous": "1", "candidate": "3"}
    first, rejected, _, third, _ = story.rows
    assert [row["champion"] for row in (first, rejected, third)] == [None, "1", "1"]
    # The champion is evaluated as it was when it was a candidate: same prompts, same seeds.
    assert rejected["kl_champion"] == pytest.approx(first["kl_candidate"], rel=1e-4)
    assert third["kl_candidate"] < third["kl_champion"]


def test_a_rejected_candidate_stays_registered_with_its_reasons(story: Story) -> None:
    tags = story.client.get_model_version("student", "2").tags
    assert tags["gate"] == "rejected"
    assert "KL" in tags["gate.reasons"]
    evidence = json.loads(tags["gate.evidence"])
    assert evidence["held-out"]["prompts"] == 48
    assert evidence["other"]["prompts"] == 8


def test_both_champions_are_tagged_with_what_replaced_what(story: Story) -> None:
    old, new = (story.client.get_model_version("student", v).tags for v in ("1", "3"))
    assert old["replaced_by"] == "3" and new["replaced"] == "1"
    assert new["gate"] == "promoted" and new["base"] == "version 1"
    assert new["prompts_digest"] != old["prompts_digest"]
    assert new["teacher_digest"] == old["teacher_digest"]


def test_the_report_is_with_the_run_and_the_table_is_exported(story: Story) -> None:
    run = story.rows[0]["mlflow_run"]
    path = mlflow.artifacts.download_artifacts(
        run_id=run, artifact_path="report.md", tracking_uri=story.client.tracking_uri
    )
    report = Path(path).read_text()
    assert "student version 1: promoted to champion" in report
    assert "| other | 8 |" in report
    exported = pq.read_table(story.folder / "runs" / "nights" / "export" / "student.parquet")
    assert exported.num_rows == 5


def test_a_run_that_was_killed_is_closed_by_the_next_night(story: Story) -> None:
    experiment = story.client.get_experiment_by_name("opdflow")
    runs = story.client.search_runs([experiment.experiment_id])
    assert {run.info.run_name: run.info.status for run in runs}["killed"] == "KILLED"
    assert not [run for run in runs if run.info.status == "RUNNING"]


def test_rollback_lineage_and_promotion_by_hand(
    story: Story, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--mlflow", f"{story.folder}/runs"]
    assert main(["lineage", "student", "3", *where]) == 0
    said = capsys.readouterr().out
    assert "replaced" in said and "gate.reasons" in said and story.rows[3]["mlflow_run"] in said

    assert main(["rollback", "student", *where]) == 0
    assert "champion 3 → 1" in capsys.readouterr().out
    assert _aliases(story) == {"champion": "1", "candidate": "3"}

    assert main(["rollback", "student", *where]) == 2
    assert "no previous champion" in capsys.readouterr().err

    assert main(["promote", "student", *where]) == 0
    assert _aliases(story) == {"champion": "3", "previous": "1", "candidate": "3"}
    assert main(["promote", "student", "9", *where]) == 2
    assert "no version 9" in capsys.readouterr().err


def test_a_registry_that_is_not_there_is_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rollback", "student", "--mlflow", str(tmp_path)]) == 2
    assert "no such file" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def _aliases(story: Story) -> dict[str, str]:
    found = story.client.get_registered_model("student").aliases
    return {alias: str(version) for alias, version in found.items()}
