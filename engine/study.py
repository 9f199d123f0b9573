"""Training under an exact, chosen staleness: the controlled experiment of AsyncOPD (2606.24143).

    k + 1 batches by the initial student ─► [oldest … newest] ─► train on the oldest
                                                   ▲                    │
                                                   └── one new batch by the new student

At version v the batch that is trained on was generated at version max(0, v - k): once the run is
under way every token is k steps old. One process and no asynchrony, so that nothing but the
staleness differs between two runs of one seed.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from engine.config import RunConfig
from engine.evaluation import Figures, evaluate_models
from engine.learner import LearnerWorker, StepReport
from engine.models import Language, pick_device, pick_dtype
from engine.preflight import Inputs
from engine.prompts import PromptStream
from engine.rollout import RolloutWorker
from engine.scoring import TeacherWorker


@dataclass(frozen=True)
class Outcome:
    """What became of a controlled run."""

    figures: Figures
    """Held-out."""
    bytes_per_token: float
    """Of the cache, mean over the steps."""
    entropy: float
    """Of the student at the last step, in nats."""


def controlled(
    config: RunConfig,
    inputs: Inputs,
    on_step: Callable[[StepReport], None] = lambda report: None,
    save_to: Path | None = None,
) -> Outcome:
    """Distils with every batch `config.staleness.max` steps old; keeps the student in a folder if
    one is given."""
    device = pick_device()
    dtype = pick_dtype(config.student.dtype, device)
    student = Language(inputs.student, pick_dtype("float32", device), device)
    teacher = Language(inputs.teacher, pick_dtype(config.teacher.dtype, device), device)
    line = _Line(config, inputs, student, teacher)
    learner = LearnerWorker(student, dtype, config)
    learner.imitate(inputs.teacher, teacher.head_weights())
    steps, sizes = config.training.steps, []
    line.generate(0, min(config.staleness.max + 1, steps))
    for step in range(1, steps + 1):
        batch = line.oldest()
        learner.load([batch], [list(range(batch.num_rows))], learner.version)
        report = learner.step()
        on_step(report)
        sizes.append(report.metrics["cache/bytes"])
        if line.generated < steps:
            line.generate(step, 1)
    if save_to:
        student.save(save_to)
    figures = evaluate_models(
        student,
        teacher,
        inputs.evaluation,
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        teacher_temperature=config.teacher.temperature,
        seed=config.seed,
    )
    return Outcome(figures, sum(sizes) / steps, report.metrics["train/entropy"])


class _Line:
    """Batches that wait for training, in order."""

    def __init__(
        self, config: RunConfig, inputs: Inputs, student: Language, teacher: Language
    ) -> None:
        rollout = config.rollout
        self._config = config
        self._worker = RolloutWorker(
            student.sampler(rollout.temperature, rollout.slots),
            student.decode,
            config.estimator.cache,
            rollout.max_new_tokens,
            config.seed,
        )
        self._teacher = TeacherWorker(
            teacher, config.teacher.temperature, config.scoring.token_budget, config.seed
        )
        self._stream = PromptStream(inputs.prompts, config.seed)
        self._waiting: deque[pa.RecordBatch] = deque()
        self.generated = 0

    def generate(self, version: int, batches: int) -> None:
        """So many batches by the student as it is, which is this version."""
        size = self._config.training.batch
        self._worker.version = version
        rollouts, _ = self._worker.generate(self._stream.take(batches * size))
        scored, _ = self._teacher.score([rollouts], self._config.estimator.cache)
        # Short responses finish first; a batch is to hold the prompts that came next.
        in_order = scored.take(pc.sort_indices(scored["ticket"]))
        self._waiting.extend(in_order.slice(i * size, size) for i in range(batches))
        self.generated += batches

    def oldest(self) -> pa.RecordBatch:
        return self._waiting.popleft()
