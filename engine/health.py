"""Whether a run is healthy: each step's metrics against the ranges of the catalogue.

    record ─► values so far ─► median of the last few ─► outside its range? ─► a symptom, told once

Single steps are noisy: a batch of long responses doubles the loss, and one token that the sampler
thought next to impossible takes the effective sample to a tenth. So a range holds for the median of
a few steps, unless one is enough. A symptom is told when it begins, and again only after the metric
has been back in its range.
"""

import math
import statistics
from dataclasses import dataclass

from engine.loop import StepRecord
from engine.metrics import CATALOGUE, PAST, START, TEACHER, Metric, Range

# Values before the last few that a metric is compared with, where its range is one of its past.
PAST_STEPS = 20


@dataclass(frozen=True)
class Symptom:
    """A metric that has left its range."""

    step: int
    metric: str
    value: float
    """Median of the last steps, as the range counts them."""
    text: str
    """One line: what it is and what to do."""


class Guard:
    """Watches the steps of one run."""

    def __init__(self, catalogue: dict[str, Metric] = CATALOGUE) -> None:
        self._catalogue = catalogue
        self._history: list[StepRecord] = []
        self.teacher: dict[str, float] = {}
        """What the teacher's own value of a metric is, for ranges that are multiples of it."""
        self.present: dict[str, Symptom] = {}
        """The symptoms that the last step has, by metric."""

    def observe(self, record: StepRecord) -> list[Symptom]:
        """The symptoms that begin with this step. A step that is made again, after a failure,
        takes the place of what came after it."""
        self._history = [old for old in self._history if old.step < record.step] + [record]
        found = {name: s for name in self._catalogue if (s := self._symptom(name, record.step))}
        new = [symptom for name, symptom in found.items() if name not in self.present]
        self.present = found
        return new

    def _symptom(self, name: str, step: int) -> Symptom | None:
        metric, last = self._catalogue[name], self._history[-1].metrics.get(name, 0.0)
        if not math.isfinite(last):
            text = f"step {step}: {name} is {last}; lower optimizer.lr, or see the data"
            return Symptom(step, name, last, text)
        for healthy in metric.healthy:
            value = self._measured(name, healthy)
            if value is not None and not healthy.low <= value <= healthy.high:
                is_out = f"{name} is {value:.2g}{healthy.unit}, healthy is {healthy.inside}"
                return Symptom(step, name, value, f"step {step}: {is_out}; {metric.advice}")
        return None

    def _measured(self, name: str, healthy: Range) -> float | None:
        """The value that the range speaks of; None where there are too few steps for it, or
        nothing to divide by."""
        last = self._values(name)[-healthy.steps :]
        if len(last) < healthy.steps:
            return None
        unit = self._unit(name, healthy) if healthy.of else 1.0
        return statistics.median(last) / unit if unit > 0 else None

    def _unit(self, name: str, healthy: Range) -> float:
        """What the bounds are multiples of; 0 where it is not known."""
        if healthy.of == TEACHER:
            return self.teacher.get(name, 0.0)
        if healthy.of in (PAST, START):
            before = self._values(name)[: -healthy.steps]
            before = before[-PAST_STEPS:] if healthy.of == PAST else before[: healthy.steps]
            return statistics.median(before) if len(before) >= healthy.steps else 0.0
        return statistics.median(self._values(healthy.of)[-healthy.steps :] or [0.0])

    def _values(self, name: str) -> list[float]:
        return [r.metrics[name] for r in self._history if name in r.metrics]
