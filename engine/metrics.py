"""The catalogue of metrics: what each is, in which unit, and what to do when it moves.

Emitting a name that is not here is an error, so the catalogue can't lag behind the code. The ranges
of a healthy run stand here once: the guard (engine/health.py) reads them, and so do the README's
table and the guard's texts.
"""

import math
from dataclasses import dataclass

# What a range may be a multiple of, besides another metric.
PAST, START, TEACHER = "the run's own past", "the run's start", "the teacher's"


@dataclass(frozen=True)
class Range:
    """Where a metric lies in a healthy run: the median of its values in the last steps."""

    low: float = -math.inf
    high: float = math.inf
    steps: int = 1
    of: str = ""
    """What the bounds are multiples of: PAST, START, TEACHER or another metric; nothing if empty.
    PAST is the median of some steps before the last ones, START that of the run's first ones."""

    @property
    def unit(self) -> str:
        return f" times {self.of}" if self.of else ""

    @property
    def outside(self) -> str:
        """What it is to be out of it, in words."""
        return self._words("below", "above", self.unit)

    @property
    def inside(self) -> str:
        return self._words("at least", "at most", "")

    def _words(self, low: str, high: str, unit: str) -> str:
        sides = [
            f"{word} {bound:g}{unit}"
            for word, bound in ((low, self.low), (high, self.high))
            if math.isfinite(bound)
        ]
        return " or ".join(sides) + (f" over {self.steps} steps" if self.steps > 1 else "")


@dataclass(frozen=True)
class Metric:
    """One number of a step."""

    unit: str
    meaning: str
    advice: str
    by_age: bool = False
    """Also emitted for the tokens of each age, as `name/age_3`."""
    healthy: tuple[Range, ...] = ()

    @property
    def guide(self) -> str:
        """When to act, and how."""
        outside = ", or ".join(healthy.outside for healthy in self.healthy)
        return f"{outside}: {self.advice}" if outside else self.advice


CATALOGUE: dict[str, Metric] = {
    "train/loss": Metric(
        "nats/token",
        "estimated divergence from the teacher on the trained tokens, in the first pass",
        "training goes the wrong way: lower optimizer.lr or staleness.max",
        healthy=(Range(high=2, steps=3, of=START), Range(high=4, steps=5, of=PAST)),
    ),
    "train/accuracy": Metric(
        "fraction",
        "responses of the batch that the verifier accepts, of those with an answer",
        "should rise; compare with the held-out accuracy to see overfitting",
    ),
    "train/entropy": Metric(
        "nats/token",
        "entropy of the student at the trained tokens",
        "the student is sure of what the teacher doesn't say, it collapses: lower optimizer.lr",
        healthy=(Range(low=0.01, steps=3, of="train/loss"),),
    ),
    "train/grad_norm": Metric(
        "norm", "gradient norm before clipping, mean over updates", "spikes: lower optimizer.clip"
    ),
    "train/skipped_updates": Metric(
        "updates",
        "updates left out because their gradient was not finite",
        "lower optimizer.lr; the update's data may be at fault too",
        healthy=(Range(high=0),),
    ),
    "train/lr": Metric("1", "learning rate of AdamW at this step", "follows the schedule"),
    "train/tokens": Metric("tokens", "response tokens that reached the loss, each once", ""),
    "train/response_tokens": Metric(
        "tokens/response",
        "mean length of the trained responses",
        "without better accuracy the student loops: lower optimizer.lr or staleness.max",
        healthy=(Range(high=2, steps=3, of=PAST), Range(high=2, steps=3, of=TEACHER)),
    ),
    "train/finished": Metric(
        "fraction",
        "trained responses that ended by end-of-sequence",
        "responses are cut: they loop, or rollout.max_new_tokens is too low",
        healthy=(Range(low=0.8, steps=3, of=PAST),),
    ),
    "policy/ratio_mean": Metric(
        "1",
        "mean of p/p_old of the emitted tokens, in the first pass",
        "1 when fresh; far from 1: lower staleness.max",
    ),
    "policy/ratio_deviation": Metric(
        "1",
        "greatest |p/p_old - 1| before the step's updates, over tokens of age 0 in responses that "
        "no weight swap went through; 0 if there are none",
        "above 0.01 in float32: sampler and learner disagree, see the model's files",
    ),
    "policy/effective_sample": Metric(
        "fraction",
        "(sum r)^2 / (n sum r^2) of the ratios r of the emitted tokens",
        "the student has run far from what sampled: lower staleness.max or optimizer.lr",
        by_age=True,
        healthy=(Range(low=0.25, steps=7),),
    ),
    "policy/ratio_q05": Metric(
        "1", "5th percentile of p/p_old of the emitted tokens", "falls with age", by_age=True
    ),
    "policy/ratio_q95": Metric(
        "1",
        "95th percentile of p/p_old of the emitted tokens",
        "far above 1 at some age: lower staleness.max to below it",
        by_age=True,
    ),
    "policy/clipped_share": Metric(
        "fraction",
        "cached ids whose weight was capped, or whose gradient a stabiliser took away",
        "high: much of what the teacher says is not heard; lower staleness.max, or raise the cap",
        by_age=True,
    ),
    "cache/kept_ids": Metric("ids/token", "ids per token that entered the loss", ""),
    "cache/bytes": Metric(
        "bytes/token",
        "of cached ids, scores and hidden states, on their way to the learner",
        "high over a narrow link: take poisson, or a smaller n",
    ),
    "cache/tail_mass": Metric(
        "fraction",
        "probability of the student outside the cached ids",
        "high with top-k caches: raise k, for they never see it",
        by_age=True,
    ),
    "staleness/mean_age": Metric(
        "steps", "mean age of the trained tokens", "high with idle workers: lower staleness.max"
    ),
    "staleness/max_age": Metric(
        "steps", "age of the oldest trained token", "never above staleness.max"
    ),
    "staleness/masked_tokens": Metric(
        "tokens", "tokens beyond the bound, left out of the loss", "high: raise staleness.max"
    ),
    "staleness/dropped_responses": Metric(
        "responses", "responses beyond the bound, queued again", "high: raise staleness.max"
    ),
    "staleness/given_up_prompts": Metric(
        "prompts",
        "prompts never trained on, for all their responses went beyond the bound",
        "should be 0; raise staleness.max",
    ),
    "staleness/dropped_tokens": Metric(
        "tokens", "response tokens of the dropped responses: generated for nothing", ""
    ),
    "queue/depth": Metric(
        "responses",
        "outstanding responses that the run aims at; moves between one batch and the permits",
        "at the permits with an idle learner: raise staleness.max, or add rollout workers",
    ),
    "queue/generating": Metric("responses", "responses in generation at the step's end", ""),
    "queue/scoring": Metric("responses", "responses at the teacher at the step's end", ""),
    "queue/buffered": Metric("responses", "scored responses that wait for the learner", ""),
    "queue/scoring_wait_p50": Metric(
        "s", "median time that a finished response waited for a teacher worker", ""
    ),
    "queue/scoring_wait_p95": Metric(
        "s",
        "95th percentile of it",
        "above scoring.flush_seconds: more teacher workers, or a larger token budget",
    ),
    "queue/training_wait_p50": Metric(
        "s", "median time that a scored response waited for the learner", ""
    ),
    "queue/training_wait_p95": Metric(
        "s", "95th percentile of it", "many steps long: the depth is larger than it has to be"
    ),
    "busy/rollout": Metric(
        "fraction", "busy share of the rollout workers since the last step", "low: raise the bound"
    ),
    "busy/teacher": Metric("fraction", "busy share of the teacher workers since the last step", ""),
    "busy/learner": Metric(
        "fraction", "busy share of the learner since the last step", "low: generation is too slow"
    ),
    "busy/overlap": Metric(
        "workers",
        "sum of the three busy shares: 3 where all work all the time, about 1 where they take "
        "turns",
        "",
    ),
    "wait/rollout": Metric(
        "fraction", "share of their time that rollout workers waited for permits", "raise the bound"
    ),
    "wait/teacher": Metric(
        "fraction", "share of their time that teacher workers waited for rollouts", ""
    ),
    "wait/learner": Metric(
        "fraction",
        "share of its time that the learner waited for a complete batch",
        "high: more rollout workers, or raise staleness.max",
    ),
    "sync/rollout": Metric(
        "fraction", "share of their time that rollout workers spent on applying weights", ""
    ),
    "sync/learner": Metric(
        "fraction", "share of its time that weights were packed, beside the steps", ""
    ),
    "moved/rollouts_bytes": Metric("bytes", "rollouts on their way to teachers", ""),
    "moved/scores_bytes": Metric("bytes", "scored rollouts on their way to the learner", ""),
    "moved/weights_bytes": Metric("bytes", "published weights, counted once", ""),
    "cost/cpu_seconds": Metric("s", "processor time of all workers since the last step", ""),
    "throughput/generated": Metric("tokens/s", "response tokens sampled since the last step", ""),
    "throughput/trained": Metric("tokens/s", "response tokens trained since the last step", ""),
    "evaluation/accuracy": Metric("fraction", "held-out responses the verifier accepts", ""),
    "evaluation/kl": Metric(
        "nats/token",
        "exact KL(student || teacher) over the whole vocabulary, on the student's responses",
        "",
    ),
    "evaluation/mean_length": Metric("tokens", "mean length of the held-out responses", ""),
    "evaluation/finished": Metric(
        "fraction", "held-out responses that ended by end-of-sequence", ""
    ),
}


class UnknownMetricError(KeyError):
    """A metric was emitted that the catalogue doesn't hold."""


def by_age(name: str, age: int) -> str:
    """The name under which a metric is emitted for the tokens of one age."""
    return f"{name}/age_{age}"


def checked(values: dict[str, float]) -> dict[str, float]:
    """The values, if the catalogue knows all their names."""
    known = {name for name in values if _known(name)}
    if unknown := sorted(set(values) - known):
        raise UnknownMetricError(f"not in engine.metrics.CATALOGUE: {', '.join(unknown)}")
    return values


def _known(name: str) -> bool:
    base, separator, age = name.rpartition("/age_")
    if separator and age.isdecimal():
        return base in CATALOGUE and CATALOGUE[base].by_age
    return name in CATALOGUE
