"""The schedules side by side: what is counted, and the emulated cluster."""

import json
from pathlib import Path

import pytest

from engine.config import ConfigError, parse
from engine.preflight import check
from engine.trace import Span
from flows import bench
from flows.cli import _console, main

KEYS = ("async_over_sync", "async_over_step_off", "overlap", "idle_share", "sync_stall_share")


def test_time_in_which_workers_of_a_pool_are_busy_together_counts_once():
    spans = [
        Span("teacher-0", "score", 0.0, 4.0),
        Span("learner", "train", 2.0, 6.0),
        Span("learner", "train", 3.0, 5.0),
        Span("learner", "wait for a batch", 6.0, 8.0),
        Span("learner", "train", 8.0, 99.0),
        Span("rollout-0", "generate", 0.0, 99.0),
    ]
    # From 1 to 6, and from 8 to 10.
    assert bench._covered(spans, {"teacher-0", "learner"}, 1.0, 10.0) == 7.0
    assert bench._covered(spans, {"rollout-0"}, 1.0, 10.0) == 9.0


def test_on_an_emulated_cluster_asynchrony_keeps_all_three_roles_busy(tmp_path: Path):
    figures, plot = tmp_path / "figures.json", tmp_path / "plot.png"
    command = ["bench", "--tier", "remote", "--seeds", "1"]
    assert main([*command, "--json", str(figures), "--plot", str(plot)]) == 0
    found = json.loads(figures.read_text())["remote"]
    assert set(KEYS) <= set(found)
    # Time is virtual, so that these figures are the same on any machine.
    assert min(found["async_over_sync"]["values"]) >= 2.5
    assert min(found["async_over_step_off"]["values"]) >= 1.4
    assert min(found["overlap"]["values"]) >= 2.6
    assert max(found["sync_stall_share"]["values"]) < 0.01
    assert plot.stat().st_size > 10_000


def test_what_can_not_be_benchmarked_is_refused(tmp_path: Path, capsys):
    assert main(["bench", "--tier", "remote", "training.steps=9"]) == 2
    assert "takes no key=value" in capsys.readouterr().err


@pytest.mark.parametrize("shared", [False, True])
def test_the_arms_start_over_with_the_same_student_on_the_same_workers(
    tmp_path: Path, tiny_student: Path, tiny_teacher: Path, shared: bool
):
    for name, count in (("prompts", 40), ("evaluation", 4)):
        lines = [f'{{"text": "{name} {i}", "answer": "{i}"}}' for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    steps = 2 * bench.EDGE + 3
    config = parse(
        {
            "student": {"model": str(tiny_student)},
            "teacher": {"model": str(tiny_teacher)},
            "prompts": {"path": f"{tmp_path}/prompts.jsonl"},
            "evaluation": {"path": f"{tmp_path}/evaluation.jsonl"},
            "rollout": {"backend": "hf", "max_new_tokens": 6},
            "training": {"steps": steps, "batch": 2},
            "optimizer": {"lr": 1e-3},
        },
        "a test",
    )
    few = parse(config.model_dump() | {"training": {"steps": 2 * bench.EDGE}}, "a test")
    with pytest.raises(ConfigError, match=r"training\.steps"):
        bench.real(few, check(config), 1, shared, _console())
    outcomes = bench.real(config, check(config), 1, shared, _console())
    assert [outcome.arm for outcome in outcomes] == list(bench.ARMS)
    for outcome in outcomes:
        assert outcome.tokens_per_second > 0 and outcome.kl > 0
        assert 0 < outcome.overlap <= 2
        assert outcome.overhead >= 1
    sync, _, ours = outcomes
    assert sync.mean_age == 0 < ours.mean_age
    assert ours.kl == pytest.approx(sync.kl, rel=0.2), "nothing of one arm is left in the next"
