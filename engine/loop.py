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
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from engine.buffer import Buffer, Row
from engine.checkpoint import Position
from engine.config import RunConfig
from engine.learner import PublishReport, StepReport
from engine.metrics import checked
from engine.prompts import PromptStream
from engine.rollout import RolloutReport
from engine.schema import RolloutMeta
from engine.scoring import ScoreReport
from engine.staleness import Bound, Depth, Permits, Stage
from engine.trace import Trace, now, shares

Handle = Any
"""A batch or weights in the object store; opaque to the loop."""

MOVED = ("rollouts", "scores", "weights")
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

    async def load(self, rows: list[tuple[Handle, list[int]]], version: int) -> None:
        """Prepares the batch that this version will train on; a step may be under way."""

    async def step(self) -> StepReport:
        """Trains on the batch that was loaded for the present version."""

    async def published(self) -> tuple[Handle, PublishReport]:
        """The newest weights; a step may be under way."""


@dataclass(frozen=True)
class StepRecord:
    """All that is reported of a step."""

    step: int
    metrics: dict[str, float]
    age_tokens: dict[int, int]


@dataclass
class _Since:
    """What there was since the last step."""

    start: float
    cpu: dict[str, float]
    """Process times of the workers at the start."""
    sampled: int = 0
    dropped: int = 0
    dropped_tokens: int = 0
    given_up: int = 0
    waits: dict[str, list[float]] = field(default_factory=lambda: {"scoring": [], "training": []})
    """Seconds that rollouts waited for each."""
    moved: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MOVED, 0))
    """Bytes of what crossed processes."""


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
        trace: Trace | None = None,
    ) -> None:
        self.version = 0
        self.buffer = Buffer(Bound.of(config.staleness))
        self.permits = Permits(
            Bound.of(config.staleness).permits(config.training.batch), self._notify
        )
        self.depth = Depth(config.training.batch, self.permits.total, config.staleness.depth)
        self.trace = trace or Trace()
        self._config = config
        self._stream = stream
        self.replace_workers(rollouts, teachers, learner)
        self._on_step = on_step
        self._weights: Handle | None = None
        self._published = 0
        self._attempts: dict[int, int] = {}
        self._unscored: deque[_Waiting] = deque()
        self._waiters: list[asyncio.Future[None]] = []
        self._applied: dict[str, int] = {}
        self._running: dict[str, int] = {}
        self._scoring: dict[str, list[int]] = {}
        """Tokens of each request that a teacher worker has."""
        self._idle: dict[str, float] = {}
        """Since when a teacher worker has had none."""
        self._to_start = 0
        """Responses of the present batch that no worker has begun, under the barrier."""
        self._whole = 0
        """Unscored rollouts that are of complete batches, under the barrier."""
        self._cpu: dict[str, float] = {}
        """Process times of the workers, as they last said."""
        self._since = _Since(now(), {})

    # What the flow calls

    async def generate(self, until: int) -> None:
        """Keeps rollout and teacher workers busy until the learner has published `until`.

        Responses still in flight stay with their workers and go on in the next segment."""
        for teacher in self._teachers:
            self._scoring[teacher.name] = []
            self._idle[teacher.name] = now()
        async with asyncio.TaskGroup() as group:
            for worker in self._rollouts:
                group.create_task(self._roll(worker, until))
            group.create_task(self._score(until))

    async def train(self, until: int) -> None:
        """Consumes batches from the buffer / waits for a complete one / unblocked by scores /
        produces versions. While the learner trains, its next batch is loaded and the last version
        published."""
        if self.version >= until:
            return
        async with asyncio.TaskGroup() as group:
            loading = group.create_task(self._load(self.version))
            while self.version < until:
                start = now()
                rows = await loading
                waited = now() - start
                self.trace.call("learner", "wait for a batch", waited)
                left_over = len(self.buffer)
                if self.version + 1 < until:
                    loading = group.create_task(self._load(self.version + 1))
                report = await self._learner.step()
                self.version = report.version
                self.trace.call("learner", "train", report.busy_seconds, version=report.version)
                self._cpu["learner"] = report.cpu_seconds
                self._report(rows, report, waited, left_over)
                group.create_task(self._publish(rows))

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
        self.version = self._published = position.version
        self._weights = weights
        self._stream.restore(position.cursor, position.waiting)
        self._unscored.clear()
        self._applied.clear()
        self._running.clear()
        self._cpu.clear()  # of new processes
        self._to_start = self._whole = 0
        self.permits.leases.clear()
        self.buffer = Buffer(Bound.of(self._config.staleness))
        self._attempts = {row.meta.ticket: row.meta.attempt for row in rows}
        self.permits.lease(self._attempts, "buffer")
        self.buffer.add(rows)
        self.permits.move(self._attempts, Stage.BUFFERED, "buffer")
        self._since = _Since(now(), {})

    # The concurrent loops

    async def _roll(self, worker: Rollouts, until: int) -> None:
        """Consumes prompts and weights / waits for a permit while nothing is in flight / unblocked
        by steps / produces ROLLOUT batches for the teachers."""
        while self.version < until:
            prompts = self._admit(worker)
            if prompts is None and not self._running.get(worker.name):
                start = now()
                await self._change()
                self.trace.span(worker.name, "wait for permits", start, now())
                continue
            batch, report = await worker.advance(prompts, self._fresh_weights(worker))
            self._applied[worker.name] = report.version
            self._running[worker.name] = report.running
            self._write_down(worker, report)
            if report.metas:
                self._unscored.append(_Waiting(batch, report.metas, now()))
                self.permits.move([m.ticket for m in report.metas], Stage.SCORING, "queue")

    def _fresh_weights(self, worker: Rollouts) -> Handle | None:
        """The newest weights if the worker has older ones; under the barrier, between batches."""
        inside = self._config.staleness.barrier and self._running.get(worker.name)
        stale = self._applied.get(worker.name, 0) < self._published
        return self._weights if stale and not inside else None

    async def _score(self, until: int) -> None:
        """Consumes finished rollouts / waits until they fill the token budget or one has waited for
        the flush time / unblocked by rollouts and time / produces rows of the buffer, by the
        teacher worker with the least to do."""
        async with asyncio.TaskGroup() as requests:
            while self.version < until:
                teacher = min(self._teachers, key=lambda t: sum(self._scoring[t.name]))
                waiting = self._due(len(self._scoring[teacher.name]))
                if waiting:
                    self._scoring[teacher.name].append(sum(item.tokens for item in waiting))
                    requests.create_task(self._request(teacher, waiting))
                else:
                    await self._change(self._patience(len(self._scoring[teacher.name])))

    async def _request(self, teacher: Teacher, waiting: list[_Waiting]) -> None:
        """Has one teacher worker score these rollouts."""
        self._end_idleness(teacher)
        start = now()
        self._since.waits["scoring"] += [start - item.since for item in waiting for _ in item.metas]
        tickets = [meta.ticket for item in waiting for meta in item.metas]
        self.permits.move(tickets, Stage.SCORING, teacher.name)
        batch, report = await teacher.score([item.batch for item in waiting])
        scored = now()
        self._scoring[teacher.name].remove(sum(item.tokens for item in waiting))
        if not self._scoring[teacher.name]:
            self._idle[teacher.name] = scored
        self.trace.call(teacher.name, "score", report.busy_seconds, responses=len(report.metas))
        self._cpu[teacher.name] = report.cpu_seconds
        self._since.moved["scores"] += report.nbytes
        self.buffer.add(Row(batch, meta, scored) for meta in report.metas)
        self.permits.move([m.ticket for m in report.metas], Stage.BUFFERED, "buffer")

    async def _load(self, version: int) -> list[Row]:
        """The batch that this version trains on, at the learner."""
        rows = await self._next_batch(version)
        taken = now()
        self._since.waits["training"] += [taken - row.since for row in rows]
        self.permits.move([row.meta.ticket for row in rows], Stage.TRAINING, "learner")
        await self._learner.load(_by_batch(rows), version)
        return rows

    async def _publish(self, rows: list[Row]) -> None:
        """Hands a step's weights to the rollout workers, and gives its permits back."""
        weights, report = await self._learner.published()
        if report.version > self._published:
            self._weights, self._published = weights, report.version
        self.trace.call("learner-publishing", "publish", report.seconds, version=report.version)
        self._since.moved["weights"] += report.nbytes
        tickets = [row.meta.ticket for row in rows]
        for ticket in tickets:
            del self._attempts[ticket]
        self.permits.release(tickets)

    def _admit(self, worker: Rollouts) -> pa.RecordBatch | None:
        """Prompts for a worker's free slots, with a permit each."""
        outstanding, batch = len(self.permits.leases), self._config.training.batch
        # The run's last steps need no more than this.
        left = (self._config.training.steps - self.version) * batch - outstanding
        running = self._running.get(worker.name, 0)
        if self._config.staleness.barrier:
            aim, room = batch, self._open_batch(min(batch, left))
        else:
            aim, room = self.depth.value, min(left, self.depth.value - outstanding)
        share = -(-aim // len(self._rollouts))
        slots = self._config.rollout.slots
        count = min(self.permits.free, room, share - running, slots - running)
        if count <= 0:
            return None
        self._to_start -= count
        prompts = self._stream.take(count)
        tickets = prompts["ticket"].to_pylist()
        self._attempts |= zip(tickets, prompts["attempt"].to_pylist(), strict=True)
        self.permits.lease(tickets, worker.name)
        return prompts

    def _open_batch(self, size: int) -> int:
        """Under the barrier: responses of the present batch that are still to be started. A new
        batch opens when all of the last has been generated."""
        generating = self.permits.count(Stage.GENERATING)
        if self._to_start <= 0 and not generating:
            # A smaller one, after responses were dropped, if nobody else would give permits back.
            stuck = len(self.permits.leases) == len(self.buffer)
            if self.permits.free >= size or stuck:
                self._whole = len(self._unscored)
                self._to_start = min(size, self.permits.free)
        return self._to_start

    def _due(self, requests: int) -> list[_Waiting]:
        """Rollouts to score now, by a teacher worker that has so many requests: as many as fit the
        token budget, if that many are here or the oldest has waited long enough. A worker that is
        busy takes full requests only."""
        budget = self._config.scoring.token_budget
        if not self._unscored or requests >= self._config.scoring.concurrent:
            return []
        ready = len(self._unscored)
        if self._config.staleness.barrier:
            incomplete = self._to_start > 0 or self.permits.count(Stage.GENERATING)
            ready = self._whole if incomplete else ready
        elif sum(item.tokens for item in self._unscored) < budget:
            ready = 0 if self._patience(requests) > 0 else ready
        due: list[_Waiting] = []
        while len(due) < ready and self._fits(due, budget):
            due.append(self._unscored.popleft())
        self._whole = max(0, self._whole - len(due))
        return due

    def _fits(self, due: list[_Waiting], budget: int) -> bool:
        """Whether the next unscored rollouts fit into a request; one larger than all goes alone."""
        return not due or sum(i.tokens for i in due) + self._unscored[0].tokens <= budget

    def _patience(self, requests: int) -> float:
        """Seconds until a teacher worker that has so many requests is sent one that isn't full; for
        ever where only an event can change that."""
        if requests or not self._unscored or self._config.staleness.barrier:
            return float("inf")
        flush = self._config.scoring.flush_seconds
        return flush - (now() - self._unscored[0].since)

    async def _next_batch(self, version: int) -> list[Row]:
        """Rows for the step of this version."""
        while True:
            if stale := self.buffer.evict(version):
                self._queue_again([row.meta for row in stale])
            leases = self.permits.leases.items()
            started = [t for t, lease in leases if lease.stage is not Stage.TRAINING]
            rows = self.buffer.take(self._config.training.batch, started)
            if rows is not None:
                return rows
            await self._change()

    def _queue_again(self, metas: list[RolloutMeta]) -> None:
        """Drops responses beyond the bound; their prompts are generated again."""
        for meta in metas:
            self._since.dropped += 1
            self._since.dropped_tokens += meta.response_tokens
            del self._attempts[meta.ticket]
            if meta.attempt + 1 < MAX_ATTEMPTS:
                self._stream.queue_again(meta.ticket, meta.attempt + 1)
            else:
                self._since.given_up += 1
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

    def _end_idleness(self, teacher: Teacher) -> None:
        """Writes down how long a teacher worker has had no request, if it has none."""
        if (since := self._idle.pop(teacher.name, None)) is not None:
            self.trace.span(teacher.name, "wait for rollouts", since, now())

    def _write_down(self, worker: Rollouts, report: RolloutReport) -> None:
        end = now()
        started = end - report.busy_seconds
        if report.sync_seconds:
            swap = {"version": report.version}
            self.trace.span(worker.name, "swap", started - report.sync_seconds, started, **swap)
        self.trace.span(worker.name, "generate", started, end, responses=report.running)
        self._cpu[worker.name] = report.cpu_seconds
        self._since.sampled += report.sampled_tokens
        self._since.moved["rollouts"] += report.nbytes

    def _report(self, rows: list[Row], report: StepReport, waited: float, left_over: int) -> None:
        end = now()
        for teacher in self._teachers:
            if teacher.name in self._idle:
                self._end_idleness(teacher)
                self._idle[teacher.name] = end
        since, self._since = self._since, _Since(end, dict(self._cpu))
        wall = max(end - since.start, 1e-9)
        roles = {"rollout": len(self._rollouts), "teacher": len(self._teachers), "learner": 1}
        slots = self._config.rollout.slots * len(self._rollouts)
        free_slots = slots - sum(self._running.values())
        unscored = sum(len(item.metas) for item in self._unscored)
        effective = report.metrics.get("policy/effective_sample", 1.0)  # of no tokens there is none
        share = min(1.0, waited / wall)
        if decision := self.depth.observe(share, free_slots, unscored, left_over, effective):
            self.trace.mark(decision)
        metas = [row.meta for row in rows]
        judged = [meta.correct for meta in metas if meta.correct is not None]
        queues = {
            "queue/generating": self.permits.count(Stage.GENERATING),
            "queue/scoring": self.permits.count(Stage.SCORING),
            "queue/buffered": len(self.buffer),
        }
        self.trace.counters(queues | {"queue/depth": self.depth.value})
        metrics = report.metrics | {
            "train/response_tokens": sum(m.response_tokens for m in metas) / len(metas),
            "train/finished": sum(m.finish_reason == "stop" for m in metas) / len(metas),
            "staleness/dropped_responses": since.dropped,
            "staleness/dropped_tokens": since.dropped_tokens,
            "staleness/given_up_prompts": since.given_up,
            "queue/depth": self.depth.value,
            **queues,
            "throughput/generated": since.sampled / wall,
            "throughput/trained": report.trained_tokens / wall,
            # What a worker has said for the first time is where its count begins.
            "cost/cpu_seconds": sum(self._cpu[name] - cpu for name, cpu in since.cpu.items()),
        }
        metrics |= shares(self.trace.take(), roles, wall)
        metrics["busy/overlap"] = sum(metrics[f"busy/{role}"] for role in roles)
        metrics |= {f"moved/{what}_bytes": count for what, count in since.moved.items()}
        for queue, waits in since.waits.items():
            for name, quantile in (("p50", 0.5), ("p95", 0.95)):
                value = float(np.quantile(waits, quantile)) if waits else 0.0
                metrics[f"queue/{queue}_wait_{name}"] = value
        if judged:
            metrics["train/accuracy"] = sum(judged) / len(judged)
        self._on_step(StepRecord(self.version, checked(metrics), report.age_tokens))


def _by_batch(rows: list[Row]) -> list[tuple[Handle, list[int]]]:
    """Rows grouped by the batch that holds them, in order."""
    groups: dict[int, tuple[Handle, list[int]]] = {}
    for row in rows:
        groups.setdefault(id(row.batch), (row.batch, []))[1].append(row.meta.row)
    return list(groups.values())
