"""Scripted workers in this process, for the protocols of `engine.loop`.

    FakeRollouts ──► ROLLOUT ──► FakeTeacher ──► SCORED ──► FakeLearner
         └─────────────┴── Floor: where each ticket really is ──┴──► CheckedLoop

Time is turns of the event loop: a fake that is slow yields more often, so that any order of events
takes milliseconds. Batches are real Arrow batches, and the learner takes ages and masks from the
real `StepBatch`; only models are missing. Handles are the objects themselves; weights are the
number of their version. Where each ticket is, the fakes write down on a common `Floor`, and
`CheckedLoop` compares it with the permits after every event.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from engine.batch import Ragged, StepBatch, merge
from engine.buffer import Row
from engine.config import RunConfig, Sampled, parse
from engine.learner import PublishReport, StepReport
from engine.loop import Loop, StepRecord
from engine.prompts import Prompt, PromptStream
from engine.rollout import RolloutReport
from engine.schema import (
    PROMPT,
    ROLLOUT,
    SCORED,
    VERSION_RUNS,
    describe,
    empty_lists,
    extend,
    nest,
    ragged,
    row_lengths,
    states,
)
from engine.scoring import ScoreReport
from engine.staleness import Depth, Stage

Script = Sequence[int]
"""Turns of the event loop that a worker's calls take, one after the other and over again."""


class FakeWorkerError(Exception):
    """A worker died, as its script says."""


async def pass_turns(script: Script, call: int) -> None:
    """Lets others go first; at least once, as a call to another process does."""
    for _ in range(max(1, script[call % len(script)])):
        await asyncio.sleep(0)


# Arrow batches


def rollout_batch(
    prompts: pa.RecordBatch, versions: Sequence[Sequence[int]], finish_reason: str = "stop"
) -> pa.RecordBatch:
    """ROLLOUT: for each prompt a response of which the tokens were sampled by these versions.

    Response token t of ticket n has the id 10 n + t, and log-probability -t / 8."""
    lengths = [len(row) for row in versions]
    tickets = prompts["ticket"].to_pylist()
    ids = [10 * n + t for n, size in zip(tickets, lengths, strict=True) for t in range(size)]
    logprobs = np.array([-t / 8 for size in lengths for t in range(size)], np.float32)
    token_ids = np.array(ids, np.int32)
    runs = [
        [{"version": v, "length": len(list(group))} for v, group in itertools.groupby(row)]
        for row in versions
    ]
    ones = np.ones(len(token_ids), np.int32)
    return extend(
        prompts,
        ROLLOUT,
        [
            ragged(token_ids, lengths),
            ragged(logprobs, lengths),
            pa.array(runs, VERSION_RUNS),
            pa.array([finish_reason] * len(lengths), pa.string()),
            pa.array([None] * len(lengths), pa.bool_()),
            nest(ragged(token_ids, ones), lengths),
            nest(ragged(logprobs, ones), lengths),
            empty_lists(lengths, np.uint16),
        ],
    )


def scored_batch(rollouts: pa.RecordBatch) -> pa.RecordBatch:
    """SCORED: the teacher finds each cached id half a nat less likely than the sampler did."""
    cached = Ragged.nested(rollouts["cache_logprobs"])
    lengths = row_lengths(rollouts, "response_ids")
    return extend(
        rollouts,
        SCORED,
        [
            empty_lists(lengths, np.int32),
            nest(ragged(cached.values - np.float32(0.5), cached.lengths), lengths),
            empty_lists(lengths, np.uint16),
            no_states(lengths),
            pa.array(["fake"] * len(lengths), pa.string()),
        ],
    )


def no_states(lengths: Sequence[int]) -> pa.ListArray:
    """A column of hidden states that has none."""
    return nest(states(np.zeros((sum(lengths), 0), np.float16)), lengths)


NOTHING_FINISHED = rollout_batch(pa.RecordBatch.from_pylist([], PROMPT), [])


# Workers


@dataclass
class Floor:
    """Where each outstanding ticket really is, by the workers' own word."""

    place: dict[int, str] = field(default_factory=dict)
    """A worker's name, "queue" or "buffer"."""
    published: int = 0
    started: list[tuple[int, int, int]] = field(default_factory=list)
    """(ticket, attempt, newest version published at that moment)."""
    generated: dict[tuple[int, int], int] = field(default_factory=dict)
    """Response length of each finished (ticket, attempt)."""


@dataclass
class FakeRollouts:
    """A rollout worker: one token for each running response in each slice."""

    name: str
    floor: Floor
    length: Callable[[int], int] = lambda ticket: 3
    """Tokens of a ticket's response."""
    turns: Script = (1,)
    lag: int = 0
    """Slices that pass between the arrival of weights and their use."""
    dies_at: int = -1
    """Call that raises."""
    version: int = 0
    received: list[tuple[int, int]] = field(default_factory=list)
    """(version given, version that was in use) for each call with weights."""
    _rows: dict[int, tuple[dict[str, Any], list[int]]] = field(default_factory=dict)
    _arriving: list[tuple[int, int]] = field(default_factory=list)
    _calls: int = 0

    async def advance(
        self, prompts: pa.RecordBatch | None, weights: int | None
    ) -> tuple[pa.RecordBatch, RolloutReport]:
        call, self._calls = self._calls, self._calls + 1
        for row in prompts.to_pylist() if prompts is not None else ():
            self._rows[row["ticket"]] = (row, [])
            self.floor.place[row["ticket"]] = self.name
            self.floor.started.append((row["ticket"], row["attempt"], self.floor.published))
        if weights is not None:
            self.received.append((weights, self.version))
            self._arriving.append((call + self.lag, weights))
        due = [version for slice_, version in self._arriving if slice_ <= call]
        self.version = max(self.version, *due, 0)
        assert self._rows, "a worker with nothing to do is left alone"
        for _, versions in self._rows.values():
            versions.append(self.version)
        await pass_turns(self.turns, call)
        if call == self.dies_at:
            raise FakeWorkerError(self.name)
        return self._finish()

    def _finish(self) -> tuple[pa.RecordBatch, RolloutReport]:
        sampled = len(self._rows)
        ended = [t for t, (_, versions) in self._rows.items() if len(versions) >= self.length(t)]
        finished = [self._rows.pop(ticket) for ticket in ended]
        batch = NOTHING_FINISHED
        if finished:
            rows = pa.RecordBatch.from_pylist([row for row, _ in finished], PROMPT)
            batch = rollout_batch(rows, [versions for _, versions in finished])
        for row, versions in finished:
            self.floor.place[row["ticket"]] = "queue"
            self.floor.generated[row["ticket"], row["attempt"]] = len(versions)
        report = RolloutReport(
            metas=describe(batch),
            version=self.version,
            running=len(self._rows),
            sampled_tokens=sampled,
            busy_seconds=0.0,
            sync_seconds=0.0,
            cpu_seconds=0.0,
            nbytes=batch.nbytes,
        )
        return batch, report


@dataclass
class FakeTeacher:
    """A teacher worker."""

    name: str
    floor: Floor
    turns: Script = (1,)
    dies_at: int = -1
    """Call that raises."""
    calls: list[int] = field(default_factory=list)
    """Rollouts in each call."""
    most: int = 0
    """Calls that were under way at the same time."""
    _open: int = 0

    async def score(self, batches: list[pa.RecordBatch]) -> tuple[pa.RecordBatch, ScoreReport]:
        call = len(self.calls)
        batch = pa.concat_batches(batches)
        self.calls.append(len(batch))
        tickets = batch["ticket"].to_pylist()
        self.floor.place |= dict.fromkeys(tickets, self.name)
        self._open += 1
        self.most = max(self.most, self._open)
        await pass_turns(self.turns, call)
        self._open -= 1
        if call == self.dies_at:
            raise FakeWorkerError(self.name)
        self.floor.place |= dict.fromkeys(tickets, "buffer")
        scored = scored_batch(batch)
        return scored, ScoreReport(describe(scored), 0, 0.0, 0.0, scored.nbytes)


@dataclass(frozen=True)
class Trained:
    """One response as a step saw it."""

    step: int
    """Version of the learner when it was trained on."""
    ticket: int
    attempt: int
    ages: list[int]
    """Of each token."""
    counted: list[bool]
    """Whether each token reached the loss."""


@dataclass
class FakeLearner:
    """A learner that applies the age bound by the real code and updates nothing."""

    floor: Floor
    bound: int
    turns: Script = (1,)
    dies_at: int = -1
    """Step that raises."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Emitted with the usual ones."""
    version: int = 0
    trained: list[Trained] = field(default_factory=list)
    load_turns: Script = (1,)
    publish_turns: Script = (1,)
    busy: bool = False
    beside: int = 0
    """Batches that were loaded while a step was under way."""
    _loaded: dict[int, pa.RecordBatch] = field(default_factory=dict)
    _unpublished: list[int] = field(default_factory=list)
    _publishing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def load(self, rows: list[tuple[pa.RecordBatch, list[int]]], version: int) -> None:
        batch = merge([batch for batch, _ in rows], [indices for _, indices in rows])
        self.floor.place |= dict.fromkeys(batch["ticket"].to_pylist(), "learner")
        await pass_turns(self.load_turns, version)
        self.beside += self.busy
        self._loaded[version] = batch

    async def published(self) -> tuple[int, PublishReport]:
        tickets = list(self._unpublished)
        async with self._publishing:  # one call after the other
            version = self.version
            await pass_turns(self.publish_turns, version)
            self.floor.published = version
        for ticket in tickets:
            del self.floor.place[ticket]
        return version, PublishReport(version, 0.0, 0)

    async def step(self) -> StepReport:
        batch = self._loaded.pop(self.version)
        self.busy = True
        await pass_turns(self.turns, self.version)
        self.busy = False
        if self.version == self.dies_at:
            raise FakeWorkerError("learner")
        ages = self._train(batch)
        self.version += 1
        self._unpublished = batch["ticket"].to_pylist()
        by_age = {int(age): int((ages == age).sum()) for age in np.unique(ages)}
        metrics = {"staleness/max_age": float(ages.max(initial=0))} | self.metrics
        return StepReport(self.version, metrics, by_age, len(ages), 0.0, 0.0)

    def _train(self, batch: pa.RecordBatch) -> np.ndarray:
        step = StepBatch(batch, Sampled(), self.version, self.bound, 0)
        assert np.all(step.ages >= 0), "no weights are from the future, or from a lost step"
        tokens = Ragged.of(batch["response_ids"])
        for row in step.rows:
            mine = tokens.positions(np.array([row]))
            self.trained.append(
                Trained(
                    self.version,
                    batch["ticket"][row].as_py(),
                    batch["attempt"][row].as_py(),
                    step.ages[mine].tolist(),
                    step.counted[mine].tolist(),
                )
            )
        return np.asarray(step.ages[step.counted])


class ScriptedDepth(Depth):
    """A depth that follows a script, over and over; the real one follows the clock.

    Without a script it is that of the permits, which pushes age to its bound."""

    def __init__(self, batch: int, permits: int, script: Script = ()) -> None:
        super().__init__(batch, permits)
        self.observed: list[tuple[float, int, int, int, float]] = []
        """Arguments of each call."""
        self._script = [min(permits, max(batch, value)) for value in script] or [permits]
        self.value = self._script[0]

    def observe(
        self, waited: float, free_slots: int, unscored: int, left_over: int, effective: float
    ) -> str:
        self.observed.append((waited, free_slots, unscored, left_over, effective))
        self.value = self._script[len(self.observed) % len(self._script)]
        return ""


class CheckedLoop(Loop):
    """A loop that after each event compares its permits with where the tickets are."""

    floor: Floor
    events = 0
    most = 0
    """Rollouts that were outstanding at the same time."""

    def _notify(self) -> None:
        self.events += 1
        self.most = max(self.most, len(self.permits.leases))
        self.check()
        super()._notify()

    def check(self) -> None:
        """Permits are conserved, and each lease is where its ticket is or about to go there."""
        permits = self.permits
        counts = [permits.count(stage) for stage in Stage]
        assert permits.free >= 0
        assert permits.free + sum(counts) == permits.total
        buffered = [t for t, lease in permits.leases.items() if lease.stage is Stage.BUFFERED]
        assert sorted(buffered) == sorted(row.meta.ticket for row in self.buffer.rows())
        for ticket, lease in permits.leases.items():
            place = self.floor.place.get(ticket)
            # A lease is written down first, and its ticket handed over in the same turn.
            before = {
                Stage.GENERATING: {None, "buffer"},  # of a new ticket, or one that is tried again
                Stage.SCORING: {"queue"},
                Stage.BUFFERED: set(),
                Stage.TRAINING: {"buffer"},
            }[lease.stage]
            assert place == lease.owner or place in before, (ticket, lease, place)
        for ticket in self.floor.place.keys() - permits.leases.keys():
            assert self.floor.place[ticket] == "buffer", "only a dropped response has no permit"

    def check_settled(self) -> None:
        """When nobody is busy, each lease is with its owner."""
        self.check()
        owners = {ticket: lease.owner for ticket, lease in self.permits.leases.items()}
        assert owners == {ticket: self.floor.place[ticket] for ticket in owners}


# Whole runs


def run_config(
    *,
    steps: int = 6,
    batch: int = 4,
    stale: int = 1,
    older: str = "mask",
    slots: int = 100,
    budget: int = 1,
    flush: float = 0.0,
    barrier: bool = False,
    concurrent: int = 2,
) -> RunConfig:
    """A configuration of which the loop reads everything, and nothing exists on disk."""
    return parse(
        {
            "student": {"model": "student"},
            "teacher": {"model": "teacher"},
            "prompts": {"path": "prompts.jsonl"},
            "evaluation": {"path": "evaluation.jsonl"},
            "training": {"steps": steps, "batch": batch},
            "staleness": {"max": stale, "older": older, "barrier": barrier},
            "rollout": {"slots": slots},
            "scoring": {
                "token_budget": budget,
                "flush_seconds": flush,
                "concurrent": concurrent,
            },
        },
        "a test",
    )


def prompts(count: int = 7) -> list[Prompt]:
    """Prompts of one to three tokens."""
    return [
        Prompt(f"p{i}", f"text {i}", tuple(range(1, 2 + i % 3)), None, "exact")
        for i in range(count)
    ]


class Factory:
    """A run on scripted workers: its loop, its floor, and all that came out."""

    def __init__(
        self,
        config: RunConfig,
        *,
        length: Callable[[int], int] = lambda ticket: 3,
        rollout_turns: Sequence[Script] = ((1,),),
        lags: Sequence[int] = (0,),
        teacher_turns: Sequence[Script] = ((1,),),
        learner_turns: Script = (1,),
        load_turns: Script = (1,),
        publish_turns: Script = (1,),
        depths: Script = (),
    ) -> None:
        """One rollout worker for each of `rollout_turns`, one teacher for each of
        `teacher_turns`; `lags` are the rollout workers', over and over."""
        self.config = config
        self.records: list[StepRecord] = []
        self._length = length
        self._rollout_turns, self._lags = rollout_turns, lags
        self._teacher_turns = teacher_turns
        self._learner_turns = learner_turns, load_turns, publish_turns
        self._hire()
        self.stream = PromptStream(prompts(), seed=0)
        self.loop = CheckedLoop(
            config,
            self.stream,
            self.rollouts,
            self.teachers,
            self.learner,
            self.records.append,
        )
        self.loop.floor = self.floor
        self.depth = ScriptedDepth(config.training.batch, self.loop.permits.total, depths)
        self.loop.depth = self.depth

    def _hire(self) -> None:
        self.floor = Floor()
        self.rollouts = [
            FakeRollouts(f"rollout-{i}", self.floor, self._length, script, lag)
            for i, (script, lag) in enumerate(
                zip(self._rollout_turns, itertools.cycle(self._lags), strict=False)
            )
        ]
        self.teachers = [
            FakeTeacher(f"teacher-{i}", self.floor, script)
            for i, script in enumerate(self._teacher_turns)
        ]
        step, load, publish = self._learner_turns
        bound = self.config.staleness.max
        self.learner = FakeLearner(self.floor, bound, step, load_turns=load, publish_turns=publish)

    @property
    def steps(self) -> int:
        return self.config.training.steps

    @property
    def trained(self) -> list[Trained]:
        return self.learner.trained

    def run(self, *segments: int) -> "Factory":
        """Runs to the end of each segment in turn; without segments, to the end of the run."""
        asyncio.run(self.segments(*(segments or (self.steps,))))
        return self

    async def segments(self, *untils: int) -> None:
        """Generation and training together, until each of these versions in turn."""
        for until in untils:
            # Only a deadlock takes as long as this.
            async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                group.create_task(self.loop.generate(until))
                group.create_task(self.loop.train(until))
            self.loop.check_settled()

    def save(self) -> tuple[Any, list[pa.RecordBatch], list[Trained]]:
        """A checkpoint: the position, the buffer's rows, and what has been trained."""
        rows = [merge([row.batch], [[row.meta.row]]) for row in self.loop.buffer.rows()]
        return self.loop.position(), rows, list(self.trained)

    def restore(self, saved: tuple[Any, list[pa.RecordBatch], list[Trained]]) -> None:
        """New workers, at a checkpoint."""
        position, rows, trained = saved
        self._hire()
        self.learner.version = self.floor.published = position.version
        self.learner.trained += trained
        self.loop.floor = self.floor
        self.loop.replace_workers(self.rollouts, self.teachers, self.learner)
        batch = pa.concat_batches(rows) if rows else pa.RecordBatch.from_pylist([], SCORED)
        metas = describe(batch)
        self.floor.place |= {meta.ticket: "buffer" for meta in metas}
        self.loop.restore(position, position.version, [Row(batch, meta) for meta in metas])
