"""Controlled runs: every token is exactly as old as the study says."""

import pytest

from engine.preflight import Inputs
from engine.prompts import Prompt
from engine.study import controlled
from tests.engine.tiny import random_ids, run_config

STEPS = 5


def prompts(count: int, seed: int) -> list[Prompt]:
    return [
        Prompt(f"p{i}", f"{seed} {i}", random_ids(5, seed + i, 50), None, None)
        for i in range(count)
    ]


def outcome(student, teacher, staleness, cache="dense", seed=0):
    reports = []
    config = run_config(
        student,
        teacher,
        training={"steps": STEPS, "batch": 4},
        rollout={"backend": "hf", "max_new_tokens": 6},
        staleness={"max": staleness},
        estimator={"type": "reverse_kl", "cache": {"type": cache}},
        seed=seed,
    )
    inputs = Inputs(student, teacher, prompts(40, 100), prompts(5, 900), 54, 0, 0)
    return controlled(config, inputs, reports.append), reports


@pytest.mark.parametrize("staleness", [0, 1, 3, 9])
def test_a_batch_is_as_old_as_the_study_says_from_the_first_step_on(
    tiny_student, tiny_teacher, staleness
):
    _, reports = outcome(tiny_student, tiny_teacher, staleness)
    ages = [list(report.age_tokens) for report in reports]
    assert ages == [[min(step, staleness)] for step in range(STEPS)]
    assert all(report.metrics["staleness/masked_tokens"] == 0 for report in reports)


def test_fresh_batches_come_from_the_newest_weights(tiny_student, tiny_teacher):
    _, fresh = outcome(tiny_student, tiny_teacher, 0)
    assert max(report.metrics["policy/ratio_deviation"] for report in fresh) < 1e-4
    _, stale = outcome(tiny_student, tiny_teacher, 2)
    assert stale[-1].metrics["policy/effective_sample"] < 1 - 1e-4


def test_a_seed_repeats_a_run_and_the_staleness_changes_it(tiny_student, tiny_teacher):
    one, again, other, stale = (
        outcome(tiny_student, tiny_teacher, staleness, "poisson", seed)[0]
        for staleness, seed in [(1, 0), (1, 0), (1, 1), (3, 0)]
    )
    assert one == again
    assert one.figures.kl != other.figures.kl and one.figures.kl != stale.figures.kl
    assert 0 < one.bytes_per_token < 54 * 12 and one.entropy > 0


def test_the_student_comes_closer_to_the_teacher(tiny_student, tiny_teacher):
    _, reports = outcome(tiny_student, tiny_teacher, 1)
    assert reports[-1].metrics["train/loss"] < reports[0].metrics["train/loss"]
