"""The trace of a run: shares of time, and a file that Chrome and Perfetto read."""

import json
from pathlib import Path

import pytest

from engine.trace import Span, Trace, shares

ROLES = {"rollout": 2, "teacher": 1, "learner": 1}


def events(path: Path) -> list[dict]:
    """Of a file without its end, as a run that is under way or has died leaves it."""
    return json.loads(path.read_text().rstrip(",\n") + "]")


def test_shares_are_of_the_wall_time_of_all_workers_of_a_role():
    spans = [
        Span("rollout-0", "generate", 0.0, 8.0),
        Span("rollout-1", "generate", 0.0, 2.0),
        Span("rollout-1", "swap", 2.0, 3.0),
        Span("rollout-1", "wait for permits", 3.0, 10.0),
        Span("teacher-0", "score", 1.0, 6.0),
        Span("teacher-0", "wait for rollouts", 6.0, 10.0),
        Span("learner", "train", 0.0, 9.0),
        Span("learner-publishing", "publish", 9.0, 9.5),
    ]
    assert shares(spans, ROLES, 10.0) == pytest.approx(
        {
            "busy/rollout": 0.5,  # (8 + 2) of 2 x 10 seconds
            "sync/rollout": 0.05,
            "wait/rollout": 0.35,
            "busy/teacher": 0.5,
            "wait/teacher": 0.4,
            "busy/learner": 0.9,
            "sync/learner": 0.05,  # beside the steps
            "wait/learner": 0.0,
        }
    )


def test_the_file_holds_spans_counters_and_decisions_in_microseconds(tmp_path: Path):
    path = tmp_path / "trace.json"
    trace = Trace(path)
    start = trace._start
    trace.span("rollout-0", "generate", start + 1.0, start + 1.5, responses=7)
    trace.span("rollout-0", "swap", start + 1.5, start + 1.6)
    trace.span("learner", "train", start + 2.0, start + 4.0)
    trace.counters({"queue/buffered": 3})
    trace.mark("depth 16 → 14")
    trace.take()
    found = events(path)
    names = {e["args"]["name"]: e["tid"] for e in found if e["ph"] == "M"}
    assert set(names) == {"rollout-0", "learner"}, "each worker's row is named, once"
    generate, swap, train = (e for e in found if e["ph"] == "X")
    assert (generate["ts"], generate["dur"], generate["args"]) == (1e6, 5e5, {"responses": 7})
    assert generate["tid"] == swap["tid"] == names["rollout-0"]
    assert train["tid"] == names["learner"]
    assert [(e["name"], e["args"]["value"]) for e in found if e["ph"] == "C"] == [
        ("queue/buffered", 3)
    ]
    assert [e["name"] for e in found if e["ph"] == "i"] == ["depth 16 → 14"]


def test_the_file_is_readable_before_the_run_has_ended(tmp_path: Path):
    path = tmp_path / "trace.json"
    trace = Trace(path)
    for step in range(3):
        trace.call("learner", "train", 0.5)
        trace.take()
        assert sum(e["ph"] == "X" for e in events(path)) == step + 1


def test_spans_are_taken_once_and_the_last_ones_stay_in_memory():
    trace = Trace(kept=2)
    for kind in ("generate", "swap", "generate"):
        trace.span("rollout-0", kind, 0.0, 1.0)
    assert [span.kind for span in trace.take()] == ["generate", "swap", "generate"]
    assert trace.take() == []
    assert [span.kind for span in trace.spans] == ["swap", "generate"]
