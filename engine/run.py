"""A run: its workers, its loop, its checkpoints, and what is asked of them in turn.

teacher_answers ─► evaluate ─► segments of (generate ‖ train) and checkpoint ─► evaluate
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from engine.batch import split
from engine.buffer import Row
from engine.cache import TeacherCache, key
from engine.canary import WrongSamplerError
from engine.checkpoint import Checkpoints, Position
from engine.cluster import Cluster
from engine.config import Dense, RunConfig, Sampled
from engine.evaluation import HELD_OUT, Outcomes
from engine.health import Guard, Symptom
from engine.loop import Loop, StepRecord
from engine.models import digest
from engine.names import WeightsMismatchError
from engine.preflight import Inputs
from engine.prompts import Prompt, PromptStream, to_batch
from engine.schema import RolloutMeta, row_lengths
from engine.trace import Trace

# Dense scores of an evaluation pass through the object store in parts of this size.
DENSE_BYTES = 2**28
# Sampling and scoring by one float32 model differ by rounding only; a shift by one token or another
# temperature gives differences of whole nats.
ALIGNMENT_TOLERANCE = 1e-2


@dataclass(frozen=True)
class TeacherFigures:
    """What the teacher does on the held-out prompts."""

    digest: str
    accuracy: float | None
    mean_length: float
    alignment: float
    """Greatest difference between its sampled and scored log-probabilities, in nats."""
    cached: bool
    """Read from the teacher cache."""


class MisalignedTeacherError(RuntimeError):
    """The teacher scores its own responses differently from how it sampled them."""


class Run:
    """One run of distillation."""

    def __init__(
        self, config: RunConfig, inputs: Inputs, folder: Path, all_cores: bool = False
    ) -> None:
        """With `all_cores`, each worker has all of the machine; for workers that take turns."""
        self.config = config
        self.inputs = inputs
        self.folder = folder.absolute()  # workers may run in another directory
        self.history: list[StepRecord] = []
        self._cluster = Cluster(config, inputs, all_cores)
        self._checkpoints = Checkpoints(self.folder / "checkpoints", config.checkpoint.keep)
        self._fatal: BaseExceptionGroup | None = None
        self.loop: Loop
        self.listeners: list[Callable[[StepRecord], None]] = []
        """Called with each step's record: trackers and terminals."""
        self.guard = Guard()
        self.symptoms: list[Symptom] = []
        """All that the guard has noticed so far."""
        self.symptom_listeners: list[Callable[[Symptom], None]] = []
        """Called with each of them as it begins."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(config.model_dump(mode="json"), indent=1)
        (self.folder / "config.json").write_text(text)

    @property
    def steps(self) -> int:
        return self.config.training.steps

    @property
    def student_folder(self) -> Path:
        """The newest checkpoint's model."""
        return self._checkpoints.all()[-1] / "model"

    async def start(self) -> None:
        """Brings up the workers, and a checkpoint to come back to."""
        await self._cluster.start()
        self._stream = PromptStream(self.inputs.prompts, self.config.seed)
        self.loop = self._new_loop(Trace(self.folder / "trace.json"))
        await self.checkpoint()

    async def start_over(self, config: RunConfig, trace: Trace) -> None:
        """From the last checkpoint's weights, as version 0 and by another configuration's loop, on
        the same workers. They have nothing in flight, and get the weights by `evaluate`."""
        folder, _ = self._checkpoints.latest()
        weights, _, _ = await self._cluster.learner.restore(folder, 0)
        self.config, self.history = config, []
        self._stream = PromptStream(self.inputs.prompts, config.seed)
        self.loop = self._new_loop(trace)
        self.loop.restore(Position(0, 0, []), weights, [])

    async def teacher_answers(self) -> TeacherFigures:
        """The teacher's responses to the held-out prompts, from the cache or made now, and the
        check that it scores as it samples."""
        name = digest(self.inputs.teacher)
        entry = key(
            self.inputs.evaluation,
            teacher=name,
            temperature=self.config.teacher.temperature,
            dtype=self.config.teacher.dtype,
            max_new_tokens=self.config.rollout.max_new_tokens,
            seed=self.config.seed,
        )
        cache = TeacherCache(str(Path(self.config.directory) / "teacher_cache"))
        scored = cache.read(entry)
        cached = scored is not None
        if scored is None:
            teacher = self._cluster.teachers[0]
            answers, _ = await teacher.answer(_evaluation_batch(self.inputs.evaluation))
            reference, _ = await teacher.score([answers], Sampled())
            scored = await self._cluster.value(reference)
            cache.write(entry, scored)
        sampled = scored["sampler_logprobs"].flatten().to_numpy()
        again = scored["teacher_logprobs"].flatten().flatten().to_numpy()
        alignment = float(np.abs(sampled - again).max())
        if alignment > ALIGNMENT_TOLERANCE and self.config.teacher.dtype != "bfloat16":
            raise MisalignedTeacherError(
                f"teacher {self.inputs.teacher} samples and scores the same tokens with "
                f"log-probabilities {alignment:.3g} nats apart; its files don't work as they should"
            )
        accuracy = pc.mean(scored["correct"]).as_py()
        length = float(row_lengths(scored, "response_ids").mean())
        self.guard.teacher = {"train/response_tokens": length}
        return TeacherFigures(name, accuracy, length, alignment, cached)

    async def evaluate(self) -> dict[str, Outcomes]:
        """The learner's current weights on the held-out prompts and on every guard's: sampled
        responses, verified, and the exact divergence from the teacher on them. A prompt is sampled
        by the same worker with the same seed each time. No response may be in flight."""
        weights = await self._cluster.weights()
        prompts, workers = self.inputs.evaluated, self._cluster.rollouts
        metas: dict[int, RolloutMeta] = {}
        divergence = np.zeros(len(prompts))
        for index, worker in enumerate(workers):
            share = prompts[index :: len(workers)]
            if not share:
                continue
            batch, report = await worker.generate(_evaluation_batch(share), weights)
            # Responses come in the order in which they finished.
            places = [index + len(workers) * (-1 - meta.ticket) for meta in report.metas]
            metas |= zip(places, report.metas, strict=True)
            divergence[places] = await self._divergence(batch, report.metas)
        everything = Outcomes.of([metas[place] for place in range(len(prompts))], divergence)
        return self._by_set(everything)

    async def generate(self, until: int) -> None:
        """Generation and scoring of a segment."""
        try:
            await self.loop.generate(until)
        except* (WrongSamplerError, WeightsMismatchError) as group:
            self._fatal = group
            raise

    async def train(self, until: int) -> None:
        """Training of a segment."""
        await self.loop.train(until)

    async def checkpoint(self) -> Path:
        """Saves the run as it is between two steps."""
        draft = self._checkpoints.new(self.loop.version)
        rows = [(row.batch, [row.meta.row]) for row in self.loop.buffer.rows()]
        await self._cluster.learner.save(draft, rows)
        return self._checkpoints.commit(draft, self.loop.position())

    async def recover(self) -> int:
        """After a failure: new workers, at the last checkpoint. Returns its version. Raises
        what new workers wouldn't heal."""
        if self._fatal:
            raise self._fatal
        await self._cluster.restart()
        folder, position = self._checkpoints.latest()
        learner = self._cluster.learner
        weights, buffer, metas = await learner.restore(folder, position.version)
        self.loop.replace_workers(self._cluster.rollouts, self._cluster.teachers, learner)
        self.loop.restore(position, weights, [Row(buffer, meta) for meta in metas])
        self.history = [record for record in self.history if record.step <= position.version]
        return position.version

    def trained(self) -> list[Prompt]:
        """The prompts of all responses that were trained on: of those that were handed out, all but
        the ones that are on their way."""
        position = self.loop.position()
        underway = {ticket for ticket, _ in position.waiting}
        underway |= {row.meta.ticket for row in self.loop.buffer.rows()}
        handed_out = range(position.cursor)
        return [self._stream.prompt(ticket) for ticket in handed_out if ticket not in underway]

    def close(self) -> None:
        """Stops all workers."""
        self._cluster.close()

    def _new_loop(self, trace: Trace) -> Loop:
        cluster, config = self._cluster, self.config
        return Loop(
            config,
            self._stream,
            cluster.rollouts,
            cluster.teachers,
            cluster.learner,
            self._record,
            trace,
        )

    def _by_set(self, everything: Outcomes) -> dict[str, Outcomes]:
        sets = {HELD_OUT: self.inputs.evaluation, **self.inputs.guards}
        ends = np.cumsum([len(prompts) for prompts in sets.values()]).tolist()
        starts = [0, *ends[:-1]]
        slices = zip(sets, starts, ends, strict=True)
        return {name: everything.take(slice(start, end)) for name, start, end in slices}

    async def _divergence(self, batch: object, metas: list[RolloutMeta]) -> np.ndarray:
        """[responses] summed over tokens; in parts, for the whole vocabulary is large."""
        teacher, learner = self._cluster.teachers[0], self._cluster.learner
        lengths = np.array([meta.response_tokens for meta in metas])
        budget = max(1, DENSE_BYTES // (4 * self.inputs.vocabulary))
        totals = np.zeros(len(metas))
        for rows in split(lengths, np.arange(len(metas)), budget):
            scored, _ = await teacher.score([batch], Dense(), rows.tolist())
            totals[rows] = await learner.divergence([(scored, list(range(len(rows))))])
        return totals

    def _record(self, record: StepRecord) -> None:
        self.history.append(record)
        for listener in self.listeners:
            listener(record)
        for symptom in self.guard.observe(record):
            self.symptoms.append(symptom)
            for told in self.symptom_listeners:
                told(symptom)


def _evaluation_batch(prompts: list[Prompt]) -> pa.RecordBatch:
    # Tickets below 0, so that no training response shares a seed or a name with these.
    return to_batch(prompts, range(-1, -len(prompts) - 1, -1), [0] * len(prompts))
