"""The guard on recorded runs of the demo, and on single metrics.

`recorded/` holds the metrics that have a healthy range, step by step, as whole runs of the demo
logged them: `hot-*` with a learning rate ten times too high, the others as they should be.
"""

import csv
import math
from pathlib import Path

import pytest

from engine.health import PAST_STEPS, Guard
from engine.loop import StepRecord
from engine.metrics import CATALOGUE, PAST, START, TEACHER, Metric, Range

RUNS = Path(__file__).parent / "recorded"
# Mean length of the demo's teacher's responses, in tokens.
TEACHER_LENGTH = 52.5


def recorded(name):
    with (RUNS / f"{name}.csv").open() as file:
        for row in csv.DictReader(file):
            metrics = {name: float(value) for name, value in row.items()}
            yield StepRecord(int(metrics.pop("step")), metrics, {})


def symptoms(name):
    guard = Guard()
    guard.teacher = {"train/response_tokens": TEACHER_LENGTH}
    return [symptom for record in recorded(name) for symptom in guard.observe(record)]


HOT = sorted(path.stem for path in RUNS.glob("hot-*.csv"))
HEALTHY = sorted(path.stem for path in RUNS.glob("healthy-*.csv"))


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_never_warned_about(name):
    assert symptoms(name) == []


@pytest.mark.parametrize("name", HOT)
def test_a_collapse_is_named_within_three_steps_of_its_onset(name):
    """Its onset is the first step whose loss no healthy run has at any step."""
    highest = max(r.metrics["train/loss"] for run in HEALTHY for r in recorded(run))
    onset = next(r.step for r in recorded(name) if r.metrics["train/loss"] > highest)
    first, *_ = symptoms(name)
    assert first.step <= onset + 3
    assert first.metric in ("policy/effective_sample", "train/loss")
    assert f"step {first.step}: {first.metric} is " in first.text
    assert "lower" in first.text, "what to do"


def test_there_are_recorded_runs_of_both_kinds():
    assert HOT and {"max0", "max4", "max8"} == {name.split("-")[1] for name in HEALTHY}


# Single metrics


def told(values, healthy, of=None, teacher=None):
    """Steps at which the guard tells something about the metric `m`."""
    catalogue = {"m": Metric("1", "a metric", "turn it down", healthy=(healthy,))}
    guard = Guard(catalogue)
    guard.teacher = teacher or {}
    others = of or [1.0] * len(values)
    records = [
        StepRecord(step, {"m": value, "other": other}, {})
        for step, (value, other) in enumerate(zip(values, others, strict=True), 1)
    ]
    return [symptom.step for record in records for symptom in guard.observe(record)]


def test_a_range_holds_for_the_median_of_the_last_steps():
    healthy = Range(low=0.5, steps=3)
    assert told([1, 0.1, 1, 1, 0.1, 1], healthy) == []
    assert told([1, 1, 0.1, 0.1, 1, 1], healthy) == [4]
    assert told([0.1, 0.1], healthy) == [], "too few to tell"
    assert told([0.5] * 3, healthy) == [], "the bounds are in the range"


def test_a_bound_may_be_on_either_side_and_one_step_enough():
    assert told([0, 0, 1, 0], Range(high=0)) == [3]
    assert told([0, -1], Range(low=0)) == [2]


def test_a_symptom_is_told_once_until_it_has_gone():
    assert told([0, 2, 2, 2, 0, 2], Range(high=1)) == [2, 6]


def test_a_range_may_be_of_the_runs_own_past():
    healthy = Range(high=2, steps=2, of=PAST)
    assert told([1, 1, 1, 3, 3], healthy) == [5], "the median of 1 and 3 is within"
    assert told([1, 9, 9], healthy) == [], "one step is no past"
    slow = [1.05**step for step in range(60)]
    assert told(slow, healthy) == [], "growth by less than the bound within PAST_STEPS"
    assert told([1.2**step for step in range(60)], healthy) != []
    assert told([1.0] * 30 + [9.0] * (PAST_STEPS + 30), healthy) == [31]


def test_a_range_may_be_of_the_runs_first_steps():
    healthy = Range(high=2, steps=2, of=START)
    assert told([1, 1, 3, 3], healthy) == [4]
    assert told([1, 9, 9], healthy) == [], "one step is no start"
    slow = [1.05**step for step in range(60)]
    assert told(slow, healthy) == [17], "1.05 to the power of 15 is above 2 times the start's 1.025"


def test_a_range_may_be_of_the_teachers_value_or_of_another_metric():
    healthy = Range(high=2, of=TEACHER)
    assert told([1, 5], healthy, teacher={"m": 2.0}) == [2]
    assert told([1, 5], healthy) == [], "the teacher's is not known"
    assert told([1, 1], Range(low=0.1, of="other"), of=[5, 50]) == [2]
    assert told([1, 1], Range(low=0.1, of="other"), of=[5, 0]) == [], "nothing to divide by"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_told_of_any_metric(value):
    guard = Guard()
    assert guard.observe(StepRecord(1, {"train/grad_norm": 1.0}, {})) == []
    (symptom,) = guard.observe(StepRecord(2, {"train/grad_norm": value}, {}))
    assert symptom.text.startswith(f"step 2: train/grad_norm is {value}; ")
    assert guard.present == {"train/grad_norm": symptom}
    guard.observe(StepRecord(3, {"train/grad_norm": 1.0}, {}))
    assert guard.present == {}


def test_a_skipped_update_is_told_at_once_with_what_to_do():
    (symptom,) = Guard().observe(StepRecord(1, {"train/skipped_updates": 1.0}, {}))
    assert "at most 0" in symptom.text and "lower optimizer.lr" in symptom.text


def test_after_a_failure_the_steps_that_are_made_again_count_once():
    guard = Guard({"m": Metric("1", "a metric", "", healthy=(Range(high=1, steps=3),))})
    values = [(1, 0.0), (2, 5.0), (3, 0.0), (2, 5.0), (3, 0.0), (4, 0.0)]
    assert [guard.observe(StepRecord(step, {"m": value}, {})) for step, value in values] == [[]] * 6


def test_the_catalogues_words_are_its_thresholds():
    for metric in CATALOGUE.values():
        for healthy in metric.healthy:
            assert healthy.outside in metric.guide and metric.advice in metric.guide
            assert healthy.of in ("", PAST, START, TEACHER, *CATALOGUE)
