"""Every check before a night finds what it is for, and none stops the others."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from engine.config import RunConfig, load
from engine.doctor import Doctor, memory_plan, parameters
from flows.cli import main
from tests.conftest import CHARACTERS, PADDED_IDS, POSITIONS, build_tokenizer, save_model


@pytest.fixture
def place(tmp_path: Path, tiny_student: Path, tiny_teacher: Path) -> Path:
    """A folder with models of its own, prompts, and `run.toml`."""
    shutil.copytree(tiny_student, tmp_path / "student")
    shutil.copytree(tiny_teacher, tmp_path / "teacher")
    for name in ("prompts", "evaluation"):
        rows = [json.dumps({"text": f"{name} {i}"}) for i in range(10, 20)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    (tmp_path / "run.toml").write_text(
        f"""
        directory = "{tmp_path}/runs"
        student = {{ model = "{tmp_path}/student" }}
        teacher = {{ model = "{tmp_path}/teacher" }}
        prompts = {{ path = "{tmp_path}/prompts.jsonl" }}
        evaluation = {{ path = "{tmp_path}/evaluation.jsonl" }}
        rollout = {{ backend = "hf", max_new_tokens = 16 }}
        training = {{ steps = 4, batch = 4 }}
        """
    )
    return tmp_path


def wrong(config: RunConfig) -> dict[str, str]:
    return {finding.name: finding.text for finding in Doctor(config).findings() if not finding.ok}


def test_a_healthy_configuration_passes_with_padded_vocabularies(place: Path) -> None:
    config = load(place / "run.toml")
    assert wrong(config) == {}
    padded = json.loads((place / "student" / "config.json").read_text())["vocab_size"]
    assert padded == len(build_tokenizer()) + PADDED_IDS


def _other_tokenizer(place: Path) -> list[str]:
    save_model(place / "teacher", build_tokenizer(CHARACTERS[::-1]), seed=3)
    return []


def _other_end(place: Path) -> list[str]:
    settings = GenerationConfig.from_pretrained(place / "teacher")
    settings.eos_token_id = [settings.eos_token_id, 0]
    settings.save_pretrained(place / "teacher")
    return []


def _no_template(place: Path) -> list[str]:
    for name in ("student", "teacher"):
        (place / name / "chat_template.jinja").unlink()
    return []


def _other_template(place: Path) -> list[str]:
    (place / "teacher" / "chat_template.jinja").write_text("{{ messages }}")
    return []


def _context_too_short_by_one(place: Path) -> list[str]:
    # The longest prompt is "evaluation 19", of 13 characters.
    return [f"rollout.max_new_tokens={POSITIONS - 13 + 1}"]


SICK: list[tuple[Callable[[Path], list[str]], str, str]] = [
    (_other_tokenizer, "tokenizer", "same family"),
    (_other_end, "end of sequence", "generation_config.json"),
    (_no_template, "chat template", "chat_template.jinja"),
    (_other_template, "chat template", "different chat templates"),
    (_context_too_short_by_one, "prompts and context", f"make {POSITIONS + 1}; lower one of them"),
    (lambda _: ["rollout.backend=vllm", "rollout.memory_gib=1e6"], "memory", "memory_gib"),
    (lambda _: ["tracking.uri=http://127.0.0.1:9"], "MLflow", "nobody answers"),
    (lambda _: ["directory=/proc/runs"], "storage", "/proc/runs: can't be written"),
    (lambda _: ["nightly.export=/proc/bi"], "export", "/proc/bi: can't be written"),
    (
        lambda _: ['estimator={type="forward_kl",cache={type="teacher_top_k",k=9999}}'],
        "estimator",
        "vocabulary",
    ),
    (lambda place: [f"student.model={place}/nowhere"], "models", "no such model folder"),
]


@pytest.mark.parametrize(("harm", "name", "text"), SICK, ids=[name for _, name, _ in SICK])
def test_it_finds_what_is_wrong_and_says_what_to_do(
    place: Path, harm: Callable[[Path], list[str]], name: str, text: str
) -> None:
    found = wrong(load(place / "run.toml", harm(place)))
    assert text in found[name]
    unrelated = {"memory", "MLflow", "storage", "export"} - {name}
    assert name == "models" or not unrelated & set(found)


def test_the_longest_context_that_fits_passes(place: Path) -> None:
    assert wrong(load(place / "run.toml", [f"rollout.max_new_tokens={POSITIONS - 13}"])) == {}


def test_the_command_lists_every_check_and_fails_if_one_did(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(place / "run.toml")]) == 0
    assert capsys.readouterr().out.count("ok   ") == 11
    assert main(["doctor", str(place / "run.toml"), "tracking.uri=http://127.0.0.1:9"]) == 2
    said = capsys.readouterr()
    assert said.out.count("ok   ") == 10
    assert "1 of 11 checks failed: MLflow" in said.err


def test_a_models_size_is_read_from_the_headers_of_its_files(tiny_student: Path) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_student)
    assert parameters(tiny_student) == sum(p.numel() for p in model.parameters())


def test_the_memory_plan_counts_every_worker(place: Path) -> None:
    config = load(place / "run.toml", ["rollout.backend=vllm", "rollout.workers=2"])
    one = memory_plan(load(place / "run.toml", ["rollout.backend=vllm"]), 2**28, 2**30)
    two = memory_plan(config, 2**28, 2**30)
    assert two == one | {"rollout": pytest.approx(2 * one["rollout"])}
    # 2^28 parameters of 4 bytes are 1 GiB, and the learner holds four of each.
    assert one["learner"] == pytest.approx(4.6)
    assert one["teacher"] == pytest.approx(4.6)


def test_two_steps_estimate_the_time_of_a_run(place: Path) -> None:
    (finding,) = [
        f for f in Doctor(load(place / "run.toml")).findings(True) if f.name == "two steps"
    ]
    assert finding.ok and "4 steps take about" in finding.text
    assert not list((place / "runs").iterdir()), "it leaves nothing behind"
