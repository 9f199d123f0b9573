"""`opdflow audit` on a configuration and on a run's folder."""

import json
from pathlib import Path

import pytest

from engine.checkpoint import Checkpoints, Position
from engine.config import load
from flows.cli import main
from tests.engine.tiny import language


@pytest.fixture
def run_file(tmp_path: Path, tiny_student: Path, tiny_teacher: Path) -> Path:
    for name, count in (("prompts", 20), ("evaluation", 4)):
        lines = [f'{{"text": "{name} {i}"}}' for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    path = tmp_path / "run.toml"
    path.write_text(
        f"""
        student = {{ model = "{tiny_student}" }}
        teacher = {{ model = "{tiny_teacher}" }}
        prompts = {{ path = "{tmp_path}/prompts.jsonl" }}
        evaluation = {{ path = "{tmp_path}/evaluation.jsonl" }}
        rollout = {{ max_new_tokens = 6 }}
        training = {{ steps = 3, batch = 4 }}
        """
    )
    return path


def test_a_configurations_student_is_audited_and_the_rows_are_written(run_file: Path):
    out, plot = run_file.with_name("audit.json"), run_file.with_name("audit.png")
    options = ["--responses", "4", "--repeats", "2", "--json", str(out), "--plot", str(plot)]
    assert main(["audit", str(run_file), *options]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert rows[0]["estimator"] == "teacher_hidden", "the one in use comes first"
    assert {row["sampler"] for row in rows} == {"fresh"}
    for row in rows:
        assert row.keys() >= {"estimator", "bytes_per_token", "bias", "mse", "cosine"}
    assert plot.stat().st_size > 10_000


def test_a_runs_newest_checkpoint_is_audited_fresh_and_by_the_one_before(
    run_file: Path, tiny_student: Path, tiny_teacher: Path
):
    folder = run_file.with_name("run")
    checkpoints = Checkpoints(folder / "checkpoints", keep=3)
    for version, model in ((2, tiny_teacher), (4, tiny_student)):
        draft = checkpoints.new(version)
        language(model).save(draft / "model")
        checkpoints.commit(draft, Position(version, 0, []))
    config = load(run_file).model_dump(mode="json")
    (folder / "config.json").write_text(json.dumps(config))
    out = run_file.with_name("audit.json")
    options = ['estimator.cache={type = "poisson", n = 64}', "--responses", "4", "--repeats", "1"]
    assert main(["audit", str(folder), *options, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["sampler"] for row in rows} == {"fresh", "by step-000002"}
    assert rows[0]["estimator"] == "poisson(64, 0.75)"


def test_a_folder_that_is_no_runs_is_refused(tmp_path: Path, capsys):
    assert main(["audit", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err
