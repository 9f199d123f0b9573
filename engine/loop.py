"""Generate ‖ score ‖ train, joined by the buffer.

    stream ──► rollout workers ──► queue ──► teacher workers ──► buffer ──► learner
      ▲   permits (max_staleness + 1) * batch                                │  │
      └──────────────────────── permits, after the step has published ◄──────┘  │
                 ▲                                                              │
                 └── newest weights, between two decoding steps ◄───────────────┘

Everything here runs in one event loop and holds references and metadata only; the workers are
behind the three protocols below, as Ray actors in production and as scripted fakes in tests.
Strictly synchronous training is `staleness.max = 0`: the permits are then one batch, and come back
only when its step has published.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from engine.buffer import Buffer, Row
from engine.checkpoint import Position
from engine.config import RunConfig
from engine.learner import StepReport
from engine.metrics import checked
from engine.prompts import PromptStream
from engine.rollout import RolloutReport
from engine.schema import RolloutMeta
from engine.scoring import ScoreReport
from engine.staleness import Bound, Depth, Permits, Stage

Handle = Any
"""A batch or weights in the object store; opaque to the loop."""

# A prompt whose responses went beyond the age bound this often is given up, and counted.
MAX_ATTEMPTS = 3


class Rollouts(Protocol):
    """A rollout worker."""

    name: str

    async def advance(
        self, prompts: pa.RecordBatch | None, weights: Handle | None
    ) -> tuple[Handle, RolloutReport]: ...


class Teacher(Protocol):
    """A teacher worker."""

    name: str

    async def score(self, batches: list[Handle]) -> tuple[Handle, ScoreReport]: ...


class Learner(Protocol):
    """The learner."""

    async def step(self, rows: list[tuple[Handle, list[int]]]) -> tuple[Handle, StepReport]: ...


@dataclass(frozen=True)
class StepRecord:
    """All that is reported of a step."""

    step: int
    metrics: dict[str, float]
    age_tokens: dict[int, int]


@dataclass
class _Clock:
    """Seconds and counts since the last step."""

    start: float
    rollout_busy: float = 0.0
    teacher_busy: float = 0.0
    sync: float = 0.0
    sampled: int = 0
    dropped: int = 0
    given_up: int = 0


@dataclass(frozen=True)
class _Waiting:
    """A ROLLOUT batch that waits for a teacher."""

    batch: Handle
    metas: list[RolloutMeta]
    since: float

    @property
    def tokens(self) -> int:
        return sum(meta.tokens for meta in self.metas)


class Loop:
    """The state that generation and training share."""

    def __init__(
        self,
        config: RunConfig,
        stream: PromptStream,
        rollouts: Sequence[Rollouts],
        teachers: Sequence[Teacher],
        learner: Learner,
        on_step: Callable[[StepRecord], None] = lambda record: None,
    ) -> None:
        self.version = 0
        self.buffer = Buffer(Bound.of(config.staleness))
        self.permits = Permits(
            Bound.of(config.staleness).permits(config.training.batch), self._notify
        )
        self.depth = Depth(config.training.batch, self.permits.total)
        self._config = config
        self._stream = stream
        self.replace_workers(rollouts, teachers, learner)
        self._on_step = on_step
        self._weights: Handle | None = None
        self._attempts: dict[int, int] = {}
        self._unscored: deque[_Waiting] = deque()
        self._waiters: list[asyncio.Future[None]] = []
        self._applied: dict[str, int] = {}
        self._running: dict[str, int] = {}
        self._clock = _Clock(time.perf_counter())

    # What the flow calls

    async def generate(self, until: int) -> None:
        """Keeps rollout and teacher workers busy until the learner has published `until`.

        Responses still in flight stay with their workers and go on in the next segment."""
        async with asyncio.TaskGroup() as group:
            for worker in self._rollouts:
                group.create_task(self._roll(worker, until))
            for teacher in self._teachers:
                group.create_task(self._score(teacher, until))

    async def train(self, until: int) -> None:
        """Consumes batches from the buffer / waits for a complete one / unblocked by scores /
        produces versions, and gives the permits back."""
        while self.version < until:
            start = time.perf_counter()
            rows = await self._next_batch()
            waited = time.perf_counter() - start
            left_over = len(self.buffer)
            tickets = [row.meta.ticket for row in rows]
            self.permits.move(tickets, Stage.TRAINING, "learner")
            self._weights, report = await self._learner.step(_by_batch(rows))
            self.version = report.version
            for ticket in tickets:
                del self._attempts[ticket]
            self._report(rows, report, waited, left_over)
            self.permits.release(tickets)

    def replace_workers(
        self, rollouts: Sequence[Rollouts], teachers: Sequence[Teacher], learner: Learner
    ) -> None:
        """Takes these workers; they have nothing in flight."""
        self._rollouts, self._teachers, self._learner = rollouts, teachers, learner

    def position(self) -> Position:
        """Where the run is: everything not scored yet is to be generated again."""
        buffered = {row.meta.ticket for row in self.buffer.rows()}
        again = [(t, self._attempts[t]) for t in self.permits.leases if t not in buffered]
        return Position(self.version, self._stream.cursor, again + self._stream.waiting)

    def restore(self, position: Position, weights: Handle, rows: list[Row]) -> None:
        """Goes back to a checkpoint, with workers that have nothing in flight."""
        self.version = position.version
        self._weights = weights
        self._stream.restore(position.cursor, position.waiting)
        self._unscored.clear()
        self._applied.clear()
        self._running.clear()
        self.permits.leases.clear()
        self.buffer = Buffer(Bound.of(self._config.staleness))
        self._attempts = {row.meta.ticket: row.meta.attempt for row in rows}
        self.permits.lease(self._attempts, "buffer")
        self.buffer.add(rows)
        self.permits.move(self._attempts, Stage.BUFFERED, "buffer")
        self._clock = _Clock(time.perf_counter())

    # The concurrent loops

    async def _roll(self, worker: Rollouts, until: int) -> None:
        """Consumes prompts and weights / waits for a permit while nothing is in flight / unblocked
        by steps / produces ROLLOUT batches for the teachers."""
        while self.version < until:
            prompts = self._admit(worker)
            stale = self._applied.get(worker.name, 0) < self.version
            if prompts is None and not self._running.get(worker.name):
                await self._change()
                continue
            batch, report = await worker.advance(prompts, self._weights if stale else None)
            self._applied[worker.name] = report.version
            self._running[worker.name] = report.running
            self._clock.rollout_busy += report.busy_seconds
            self._clock.sync += report.sync_seconds
            self._clock.sampled += report.sampled_tokens
            if report.metas:
                self._unscored.append(_Waiting(batch, report.metas, time.monotonic()))
                self.permits.move([m.ticket for m in report.metas], Stage.SCORING, "queue")

    async def _score(self, teacher: Teacher, until: int) -> None:
        """Consumes finished rollouts / waits until they fill the token budget or one has waited for
        the flush time / unblocked by rollouts and time / produces rows of the buffer."""
        while self.version < until:
            waiting = self._due()
            if not waiting:
                await self._change(self._flush_in())
                continue
            tickets = [meta.ticket for item in waiting for meta in item.metas]
            self.permits.move(tickets, Stage.SCORING, teacher.name)
            batch, report = await teacher.score([item.batch for item in waiting])
            self._clock.teacher_busy += report.busy_seconds
            self.buffer.add(Row(batch, meta) for meta in report.metas)
            self.permits.move([m.ticket for m in report.metas], Stage.BUFFERED, "buffer")

    def _admit(self, worker: Rollouts) -> pa.RecordBatch | None:
        """Prompts for a worker's free slots, with a permit each."""
        left = (self._config.training.steps - self.version) * self._config.training.batch
        share = -(-self.depth.value // len(self._rollouts))
        count = min(
            self.permits.free,
            self.depth.value - len(self.permits.leases),
            left - len(self.permits.leases),  # the run's last steps need no more than this
            share - self._running.get(worker.name, 0),
            self._config.rollout.slots - self._running.get(worker.name, 0),
        )
        if count <= 0:
            return None
        prompts = self._stream.take(count)
        tickets = prompts["ticket"].to_pylist()
        self._attempts |= zip(tickets, prompts["attempt"].to_pylist(), strict=True)
        self.permits.lease(tickets, worker.name)
        return prompts

    def _due(self) -> list[_Waiting]:
        """Rollouts to score now: as many as fit the token budget, if that many are here or the
        oldest has waited long enough."""
        budget = self._config.scoring.token_budget
        if not self._unscored:
            return []
        waiting = sum(item.tokens for item in self._unscored)
        if waiting < budget and self._flush_in() > 0:
            return []
        due = [self._unscored.popleft()]
        while self._unscored and sum(i.tokens for i in due) + self._unscored[0].tokens <= budget:
            due.append(self._unscored.popleft())
        return due

    def _flush_in(self) -> float:
        """Seconds until the oldest unscored rollout has waited long enough."""
        if not self._unscored:
            return float("inf")
        flush = self._config.scoring.flush_seconds
        return flush - (time.monotonic() - self._unscored[0].since)

    async def _next_batch(self) -> list[Row]:
        while True:
            if stale := self.buffer.evict(self.version):
                self._queue_again([row.meta for row in stale])
            rows = self.buffer.take(self._config.training.batch, self.permits.leases)
            if rows is not None:
                return rows
            await self._change()

    def _queue_again(self, metas: list[RolloutMeta]) -> None:
        """Drops responses beyond the bound; their prompts are generated again."""
        for meta in metas:
            self._clock.dropped += 1
            del self._attempts[meta.ticket]
            if meta.attempt + 1 < MAX_ATTEMPTS:
                self._stream.queue_again(meta.ticket, meta.attempt + 1)
            else:
                self._clock.given_up += 1
        self.permits.release([meta.ticket for meta in metas])

    # Waking up and reporting

    def _notify(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _change(self, timeout: float = float("inf")) -> None:
        """Waits for any event of the permits, or for the time given."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        # Not wait_for(): before Python 3.12 it loses a cancellation that meets the event.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if timeout == float("inf") else max(0, timeout)):
                await waiter

    def _report(self, rows: list[Row], report: StepReport, waited: float, left_over: int) -> None:
        now = time.perf_counter()
        clock, self._clock = self._clock, _Clock(now)
        wall = max(now - clock.start, 1e-9)
        slots = self._config.rollout.slots * len(self._rollouts)
        self.depth.observe(waited / wall, slots - sum(self._running.values()), left_over)
        metas = [row.meta for row in rows]
        judged = [meta.correct for meta in metas if meta.correct is not None]
        metrics = report.metrics | {
            "train/response_tokens": sum(m.response_tokens for m in metas) / len(metas),
            "train/finished": sum(m.finish_reason == "stop" for m in metas) / len(metas),
            "staleness/dropped_responses": clock.dropped,
            "staleness/given_up_prompts": clock.given_up,
            "wait/learner_seconds": waited,
            "queue/depth": self.depth.value,
            "queue/generating": self.permits.count(Stage.GENERATING),
            "queue/scoring": self.permits.count(Stage.SCORING),
            "queue/buffered": len(self.buffer),
            "busy/rollout": clock.rollout_busy / wall / len(self._rollouts),
            "busy/teacher": clock.teacher_busy / wall / len(self._teachers),
            "busy/learner": report.busy_seconds / wall,
            "sync/rollout_seconds": clock.sync,
            "throughput/generated": clock.sampled / wall,
            "throughput/trained": report.trained_tokens / wall,
        }
        if judged:
            metrics["train/accuracy"] = sum(judged) / len(judged)
        self._on_step(StepRecord(self.version, checked(metrics), report.age_tokens))


def _by_batch(rows: list[Row]) -> list[tuple[Handle, list[int]]]:
    """Rows grouped by the batch that holds them, in order."""
    groups: dict[int, tuple[Handle, list[int]]] = {}
    for row in rows:
        groups.setdefault(id(row.batch), (row.batch, []))[1].append(row.meta.row)
    return list(groups.values())
