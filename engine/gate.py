"""The gate: whether a night's candidate becomes champion.

    outcomes of champion and candidate on the same prompts ─► paired bootstrap ─► decision

Prompts are drawn again with replacement, and each draw takes both models' outcomes on a prompt, so
that a prompt which is hard for both says nothing about either. The candidate is promoted if its
held-out accuracy has risen, or its KL has fallen without a loss of accuracy, and no guard's set has
lost. Each is shown by a bound of the bootstrap's distribution, at half the level, for there are two
ways to be promoted by chance.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from engine.config import GateConfig
from engine.evaluation import HELD_OUT, Outcomes

# The level's quantile is then known to a tenth of itself.
RESAMPLES = 4000
# The same outcomes always get the same decision.
SEED = 0


@dataclass(frozen=True)
class Change:
    """A figure of champion and candidate, and the bounds of what has changed."""

    champion: float
    candidate: float
    lower: float
    """The change is above this, at half the gate's level of doubt."""
    upper: float
    """As below."""


@dataclass(frozen=True)
class Comparison:
    """Both models on one set."""

    prompts: int
    accuracy: Change | None
    """None where the set has no answers."""
    kl: Change
    """Nats/token, on each model's own responses."""


@dataclass(frozen=True)
class Decision:
    """What the gate says, and why."""

    promote: bool
    reasons: list[str]
    comparisons: dict[str, Comparison]
    """By set, the held-out one first."""


def decide(
    champion: dict[str, Outcomes], candidate: dict[str, Outcomes], gate: GateConfig
) -> Decision:
    """Compares two models' outcomes on the same sets: `held-out`, and each guard's."""
    if champion.keys() != candidate.keys() or champion.keys() != {HELD_OUT, *gate.guards}:
        raise ValueError(f"sets {[*champion]} and {[*candidate]} for guards {[*gate.guards]}")
    comparisons = {
        name: compare(outcomes, candidate[name], gate.level / 2)
        for name, outcomes in champion.items()
    }
    better, reasons = _better(comparisons[HELD_OUT], gate)
    guarded = [
        _guarded(name, comparisons[name], guard.margin) for name, guard in gate.guards.items()
    ]
    promote = better and all(kept for kept, _ in guarded)
    return Decision(promote, [*reasons, *(reason for _, reason in guarded)], comparisons)


def compare(champion: Outcomes, candidate: Outcomes, level: float) -> Comparison:
    """What has changed on one set, each bound with one-sided doubt of at most `level`."""
    answered = ~np.isnan(champion.correct)
    if not np.array_equal(answered, ~np.isnan(candidate.correct)):
        raise ValueError("champion and candidate were evaluated on different prompts")
    accuracy = None
    if answered.any():
        accuracy = _change(champion.take(answered), candidate.take(answered), _accuracy, level)
    return Comparison(len(answered), accuracy, _change(champion, candidate, _kl, level))


def _change(
    champion: Outcomes,
    candidate: Outcomes,
    figure: Callable[[np.ndarray, Outcomes], np.ndarray],
    level: float,
) -> Change:
    once = np.ones((1, len(champion.correct)))
    drawn = _resamples(len(champion.correct))
    changes = figure(drawn, candidate) - figure(drawn, champion)
    lower, upper = np.quantile(changes, [level, 1 - level]).tolist()
    return Change(figure(once, champion).item(), figure(once, candidate).item(), lower, upper)


@lru_cache(maxsize=2)
def _resamples(size: int) -> np.ndarray:
    """[resamples, size] how often each prompt is drawn."""
    random = np.random.default_rng(SEED)
    return random.multinomial(size, np.full(size, 1 / size), RESAMPLES).astype(np.float32)


def _accuracy(weights: np.ndarray, outcomes: Outcomes) -> np.ndarray:
    return _total(weights, outcomes.correct) / len(outcomes.correct)


def _kl(weights: np.ndarray, outcomes: Outcomes) -> np.ndarray:
    tokens = _total(weights, outcomes.tokens)
    return _total(weights, outcomes.divergence) / np.maximum(1, tokens)


def _total(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    return weights @ values.astype(weights.dtype)


def _better(held_out: Comparison, gate: GateConfig) -> tuple[bool, list[str]]:
    """Whether the candidate is better by one of the two ways, and what each says."""
    accuracy, kl = held_out.accuracy, held_out.kl
    if not np.isfinite([kl.champion, kl.candidate]).all():
        return False, [f"{HELD_OUT}: KL {kl.champion:.3f} → {kl.candidate:.3f} is not a number"]
    risen = accuracy is not None and accuracy.lower > gate.gain
    fallen = kl.upper < -gate.kl_gain
    kept = accuracy is None or accuracy.lower > -gate.loss
    reasons = [] if accuracy is None else [_risen(accuracy, gate.gain, risen)]
    reasons.append(_fallen(kl, gate.kl_gain, fallen))
    if accuracy is not None and fallen and not risen:
        reasons.append(_kept(accuracy, gate.loss, kept))
    return risen or (fallen and kept), reasons


def _risen(accuracy: Change, margin: float, shown: bool) -> str:
    verdict = "has risen" if shown else "is not shown to have risen"
    bound = f"the gain is at least {accuracy.lower:+.3f}, asked for is more than {margin:+.3f}"
    return f"{HELD_OUT}: accuracy {_pair(accuracy)} {verdict}: {bound}"


def _fallen(kl: Change, margin: float, shown: bool) -> str:
    verdict = "has fallen" if shown else "is not shown to have fallen"
    bound = f"the change is at most {kl.upper:+.3f}, asked for is less than {-margin:+.3f}"
    return f"{HELD_OUT}: KL {_pair(kl)} {verdict}: {bound}"


def _kept(accuracy: Change, margin: float, shown: bool) -> str:
    verdict = "has not been lost" if shown else "may have been lost"
    return (
        f"{HELD_OUT}: accuracy {verdict}: the change is at least {accuracy.lower:+.3f}, "
        f"allowed is {-margin:+.3f}"
    )


def _guarded(name: str, comparison: Comparison, margin: float) -> tuple[bool, str]:
    """Whether a guard's set has not lost, by accuracy or, without answers, by KL."""
    accuracy, kl = comparison.accuracy, comparison.kl
    if accuracy is not None:
        kept, text = accuracy.lower > -margin, f"accuracy {_pair(accuracy)}"
        bound = f"at least {accuracy.lower:+.3f}, allowed is {-margin:+.3f}"
    else:
        kept, text = kl.upper < margin, f"KL {_pair(kl)}"
        bound = f"at most {kl.upper:+.3f}, allowed is {margin:+.3f}"
    verdict = "is kept" if kept else "may be worse"
    return kept, f"{name}: {text} {verdict}: the change is {bound}"


def _pair(change: Change) -> str:
    return f"{change.champion:.3f} → {change.candidate:.3f}"
