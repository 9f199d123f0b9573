"""The gate's decisions are made from per-prompt outcomes alone."""

import numpy as np
import pytest

from engine.config import GateConfig
from engine.evaluation import HELD_OUT, Outcomes
from engine.gate import compare, decide

SIZE = 256


def outcomes(correct: float | None, kl: float = 0.2, size: int = SIZE, seed: int = 0) -> Outcomes:
    """Right on the first `correct` share of the prompts, and `kl` nats/token on average."""
    random = np.random.default_rng(seed)
    right = np.full(size, np.nan) if correct is None else (np.arange(size) < correct * size) * 1.0
    tokens = random.integers(10, 50, size)
    divergence = tokens * kl * random.uniform(0.8, 1.2, size)
    return Outcomes(right, divergence, tokens, np.ones(size, bool))


def decision(champion: Outcomes, candidate: Outcomes, **gate):
    return decide({HELD_OUT: champion}, {HELD_OUT: candidate}, GateConfig(**gate))


def test_a_clear_gain_of_accuracy_promotes_and_the_reason_names_both_figures():
    made = decision(outcomes(0.5), outcomes(0.75))
    assert made.promote
    assert "held-out: accuracy 0.500 → 0.750 has risen" in made.reasons[0]


def test_the_same_outcomes_do_not_promote():
    made = decision(outcomes(0.5), outcomes(0.5))
    assert not made.promote
    assert all("not shown" in reason for reason in made.reasons)


def test_a_loss_of_accuracy_is_rejected():
    assert not decision(outcomes(0.8), outcomes(0.1)).promote


def test_the_bounds_are_those_of_the_paired_difference():
    # 27 of 256 prompts were gained, none lost: the gain is 0.105 and its standard deviation
    # sqrt(0.105 * 0.895 / 256) = 0.0192, so the 2.5 % bound is near 0.105 - 1.96 * 0.0192 = 0.068.
    accuracy = compare(outcomes(0.5), outcomes(0.6016), 0.025).accuracy
    assert accuracy.candidate - accuracy.champion == pytest.approx(27 / 256)
    assert accuracy.lower == pytest.approx(0.068, abs=0.004)
    assert accuracy.upper == pytest.approx(0.143, abs=0.004)


def test_prompts_that_both_models_share_do_not_widen_the_bounds():
    # Unpaired, the standard deviation would be sqrt(2 * 0.25 / 256) = 0.044, and 0.1 not enough.
    paired = compare(outcomes(0.5), outcomes(0.6016), 0.025).accuracy
    shuffled = outcomes(0.6016).take(np.random.default_rng(0).permutation(SIZE))
    unpaired = compare(outcomes(0.5), shuffled, 0.025).accuracy
    assert paired.upper - paired.lower < 0.6 * (unpaired.upper - unpaired.lower)


def test_a_gain_within_the_margin_is_not_enough():
    assert decision(outcomes(0.5), outcomes(0.6)).promote
    assert not decision(outcomes(0.5), outcomes(0.6), gain=0.1).promote


def test_a_fallen_kl_promotes_where_the_accuracy_is_kept():
    made = decision(outcomes(0.5, kl=0.3), outcomes(0.5, kl=0.2))
    assert made.promote
    assert "KL" in made.reasons[1] and "has fallen" in made.reasons[1]
    assert "not been lost" in made.reasons[2]


def test_a_fallen_kl_does_not_make_good_for_lost_accuracy():
    made = decision(outcomes(0.5, kl=0.3), outcomes(0.42, kl=0.1))
    assert not made.promote
    assert "may have been lost" in made.reasons[2]


def test_a_fall_of_kl_within_its_margin_is_not_enough():
    assert not decision(outcomes(0.5, 0.3), outcomes(0.5, 0.2), kl_gain=0.12).promote


def test_a_set_without_answers_is_judged_by_kl():
    made = decision(outcomes(None, 0.3), outcomes(None, 0.2))
    assert made.promote
    assert made.comparisons[HELD_OUT].accuracy is None
    assert not decision(outcomes(None, 0.2), outcomes(None, 0.3)).promote


def test_a_kl_per_token_weighs_responses_by_their_length():
    # 1 nat over 1 token and 1 nat over 9 tokens are 2 nats over 10 tokens.
    both = Outcomes(np.ones(2), np.array([1.0, 1.0]), np.array([1, 9]), np.ones(2, bool))
    assert compare(both, both, 0.025).kl.champion == pytest.approx(0.2)


def test_a_kl_that_is_not_a_number_is_rejected_whatever_the_accuracy():
    made = decision(outcomes(0.1), outcomes(0.9, kl=float("nan")))
    assert not made.promote
    assert "not a number" in made.reasons[0]


@pytest.mark.parametrize(
    ("before", "after", "promoted"),
    [
        (outcomes(0.9), outcomes(0.9), True),
        (outcomes(0.9), outcomes(0.84), False),
        (outcomes(None, 0.2), outcomes(None, 0.21), True),
        (outcomes(None, 0.2), outcomes(None, 0.3), False),
    ],
    ids=["kept", "lost", "kept by KL", "lost by KL"],
)
def test_a_guard_stops_a_better_candidate_that_loses_on_its_set(before, after, promoted):
    guard = {"path": "general.jsonl", "margin": 0.05}
    made = decide(
        {HELD_OUT: outcomes(0.5), "general": before},
        {HELD_OUT: outcomes(0.9), "general": after},
        GateConfig(guards={"general": guard}),
    )
    assert made.promote is promoted
    assert made.reasons[-1].startswith("general: ")


def test_a_decision_is_the_same_each_time():
    champion, candidate = outcomes(0.5, 0.21, seed=1), outcomes(0.55, 0.2, seed=2)
    assert decision(champion, candidate) == decision(champion, candidate)


def test_outcomes_of_other_prompts_or_sets_are_refused():
    with pytest.raises(ValueError, match="different prompts"):
        decision(outcomes(0.5), outcomes(None))
    with pytest.raises(ValueError, match="general"):
        decide(
            {HELD_OUT: outcomes(0.5)},
            {HELD_OUT: outcomes(0.9)},
            GateConfig(guards={"general": {"path": "general.jsonl"}}),
        )


def test_chance_promotes_no_more_often_than_the_level_says():
    random = np.random.default_rng(0)
    made = [decision(*(coins(random) for _ in range(2)), level=0.1).promote for _ in range(300)]
    assert 0.01 < np.mean(made) < 0.1


def coins(random: np.random.Generator) -> Outcomes:
    """A model that is right by chance on 100 prompts."""
    correct = (random.random(100) < 0.5).astype(float)
    return Outcomes(correct, random.lognormal(0, 1, 100), np.full(100, 9), np.ones(100, bool))
