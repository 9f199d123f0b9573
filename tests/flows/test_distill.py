"""Whole runs of the flow, with real Ray, real Prefect and real MLflow, on the tiny models."""

import asyncio
import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest
import ray
from prefect.testing.utilities import prefect_test_harness
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine import preflight
from engine.config import load
from engine.loop import StepRecord
from engine.run import Run
from flows.cli import main
from flows.distill import segment_of


@pytest.fixture
def run_file(tmp_path: Path, tiny_student: Path, tiny_teacher: Path) -> Path:
    """The configuration of a run of a few steps, with its prompts."""
    _write_prompts(tmp_path / "prompts.jsonl", "add", 40)
    _write_prompts(tmp_path / "evaluation.jsonl", "sum", 6)
    path = tmp_path / "run.toml"
    path.write_text(
        f"""
        directory = "{tmp_path}/runs"
        student = {{ model = "{tiny_student}" }}
        teacher = {{ model = "{tiny_teacher}" }}
        prompts = {{ path = "{tmp_path}/prompts.jsonl" }}
        evaluation = {{ path = "{tmp_path}/evaluation.jsonl" }}
        rollout = {{ backend = "hf", max_new_tokens = 24 }}
        training = {{ steps = 4, batch = 4, mini_batches = 2 }}
        optimizer = {{ lr = 1e-2 }}
        checkpoint = {{ every = 2, retries = 1 }}
        """
    )
    return path


def test_a_run_ends_with_a_registered_candidate_that_loads_and_generates(run_file: Path) -> None:
    done = _opdflow(["run", str(run_file), "--json", str(run_file.with_name("figures.json"))])

    assert done.returncode == 0, done.stderr
    figures = json.loads(run_file.with_name("figures.json").read_text())
    for name in ("before", "after"):
        assert set(figures[name]) >= {"accuracy", "kl", "mean_length"}
        assert figures[name]["kl"] > 0
    assert figures["seconds"]["total"] > 0
    assert figures["trained_tokens_per_second"] > 0
    assert figures["max_age"] <= 1
    assert "Traceback" not in done.stdout + done.stderr
    assert Path(figures["run_directory"]).is_dir()

    mlflow.set_tracking_uri(figures["mlflow_uri"])
    client = mlflow.MlflowClient()
    version = client.get_model_version_by_alias("student", "candidate")
    assert str(version.version) == figures["model_version"]
    assert version.tags["teacher"]
    assert version.tags["after.kl"] == str(figures["after"]["kl"])
    folder = mlflow.artifacts.download_artifacts(
        "models:/student@candidate", dst_path=str(run_file.with_name("candidate"))
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    output = model.generate(**tokenizer("1+2", return_tensors="pt"), max_new_tokens=3)
    assert output.shape[1] > 3

    tracked = client.get_run(figures["mlflow_run"])
    assert tracked.info.status == "FINISHED"
    assert tracked.data.params["training.steps"] == "4"
    losses = client.get_metric_history(figures["mlflow_run"], "train/loss")
    assert [point.step for point in losses] == [1, 2, 3, 4]
    plots = {item.path for item in client.list_artifacts(figures["mlflow_run"])}
    assert plots >= {"learning_curve.png", "staleness.png", "timeline.png"}
    assert figures["cpu_seconds_per_million_tokens"] > 0 and figures["settled_depth"] > 0

    _generation_and_training_overlapped(run_file.parent / "runs" / "prefect" / "prefect.db")


def test_a_failed_segment_starts_again_from_its_checkpoint(
    run_file: Path, prefect_server: None
) -> None:
    config = load(run_file, ["training.steps=4", "checkpoint.every=2"])
    run = Run(config, preflight.check(config), run_file.parent / "runs" / "retry")
    kills: list[int] = []

    def kill_the_teacher_once(record: StepRecord) -> None:
        if record.step == 3 and not kills:
            kills.append(record.step)
            ray.kill(run.loop._teachers[0].actor)

    async def two_segments() -> None:
        await run.start()
        run.listeners.append(kill_the_teacher_once)
        segment = segment_of(run).with_options(retries=1)
        for first, last in ((1, 2), (3, 4)):
            await segment(first, last)

    try:
        asyncio.run(two_segments())
    finally:
        run.close()
    assert kills == [3]
    assert run.loop.version == 4
    # Step 3 was made twice, the first time for nothing: its record is gone with it.
    assert [record.step for record in run.history] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.max_new_token=3"], "did you mean `rollout.max_new_tokens`?"),
        (["student.model=/nowhere/student"], "/nowhere/student: no such model folder"),
        (["prompts.path=/nowhere.jsonl"], "/nowhere.jsonl: no such prompt file"),
        (["prompts.max_tokens=3"], "row 1 (add-0)"),
        (['estimator={type="forward_kl",cache={type="teacher_top_k",k=9999}}'], "vocabulary"),
        (["tracking.uri=http://127.0.0.1:9"], "nobody answers at http://127.0.0.1:9"),
        (["tracking.uri=http://user:secret@127.0.0.1:9"], "holds a user or password"),
    ],
)
def test_bad_input_is_refused_before_a_worker_starts(
    run_file: Path, overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(run_file), *overrides]) == 2

    said = capsys.readouterr().err
    assert message in said
    assert "secret" not in said
    assert not (run_file.parent / "runs").exists(), "a run makes its folder before its workers"


def test_an_unreachable_prefect_server_is_refused_before_a_worker_starts(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")

    assert main(["run", str(run_file)]) == 2

    assert "PREFECT_API_URL: nobody answers" in capsys.readouterr().err
    assert not (run_file.parent / "runs").exists()


@pytest.fixture(scope="module")
def prefect_server() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=120):
        yield


def _write_prompts(path: Path, name: str, count: int) -> None:
    rows = [
        {"id": f"{name}-{i}", "text": f"{name} {i}+{i + 1}", "answer": str(i), "verifier": "number"}
        for i in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))


def _opdflow(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flows.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def _generation_and_training_overlapped(database: Path) -> None:
    """In each segment, as Prefect saw it; and each showed its progress."""
    with sqlite3.connect(database) as connection:
        runs = connection.execute(
            "select flow_run_id, name, start_time, end_time from task_run"
        ).fetchall()
        progress = connection.execute("select key, data from artifact").fetchall()
    spans = {(run, name.split("-")[0]): (start, end) for run, name, start, end in runs}
    segments = {run for run, name in spans if name == "generate"}
    assert len(segments) == 2
    for segment_run in segments:
        generate, train = spans[segment_run, "generate"], spans[segment_run, "train"]
        assert generate[0] < train[1]
        assert train[0] < generate[1]
    keys = [key for key, _ in progress]
    assert {"generate", "train", "result"} <= set(keys)


def test_a_run_that_collapses_says_so_in_the_terminal_in_mlflow_and_in_prefect(
    run_file: Path,
) -> None:
    figures_file = run_file.with_name("figures.json")
    hot = ["training.steps=10", "optimizer.lr=3", "optimizer.warmup_steps=0", "checkpoint.every=10"]
    done = _opdflow(["run", str(run_file), *hot, "--json", str(figures_file)])

    assert done.returncode == 0, done.stderr
    figures = json.loads(figures_file.read_text())
    texts = [symptom["text"] for symptom in figures["symptoms"]]
    assert texts
    for text in texts:
        assert f"! {text}" in done.stdout, "a line of its own"

    mlflow.set_tracking_uri(figures["mlflow_uri"])
    tags = mlflow.MlflowClient().get_run(figures["mlflow_run"]).data.tags
    newest = {symptom["metric"]: symptom["text"] for symptom in figures["symptoms"]}
    assert {k: v for k, v in tags.items() if k.startswith("health/")} == {
        f"health/{metric}": text for metric, text in newest.items()
    }

    database = sqlite3.connect(run_file.parent / "runs" / "prefect" / "prefect.db")
    (artifact,) = database.execute(
        "select data from artifact where key = 'health' order by created desc limit 1"
    ).fetchone()
    assert all(text in artifact for text in texts)
