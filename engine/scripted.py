"""Workers of which nothing is real but the time they take, for the protocols of `engine.loop`.

The real loop, with its permits, queues and age bound, runs on them as on models: in real time, to
measure what the loop itself costs and gives, or in virtual time (`run_virtually`), to see an hour
of a cluster in a second.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pyarrow as pa

from engine.learner import PublishReport, StepReport
from engine.rollout import RolloutReport
from engine.schema import RolloutMeta, row_lengths
from engine.scoring import ScoreReport
from engine.trace import now

T = TypeVar("T")
Runs = list[list[int]]
"""[version, tokens] of a response, run by run."""
Batch = list[tuple[Runs, RolloutMeta]]
CLOCK_TICK = 1e-9  # seconds of virtual time


@dataclass
class _Response:
    ticket: int
    attempt: int
    prompt_tokens: int
    left: int
    runs: Runs = field(default_factory=list)

    def meta(self, row: int) -> RolloutMeta:
        versions = [version for version, _ in self.runs]
        tokens = sum(count for _, count in self.runs)
        return RolloutMeta(
            self.ticket,
            self.attempt,
            row,
            self.prompt_tokens,
            tokens,
            min(versions),
            max(versions),
            "stop",
            None,
        )

    def grow(self, version: int, tokens: int) -> None:
        self.left -= tokens
        if self.runs and self.runs[-1][0] == version:
            self.runs[-1][1] += tokens
        else:
            self.runs.append([version, tokens])


@dataclass
class ScriptedRollouts:
    """Generates responses of given lengths, one token of each at a decoding step."""

    name: str
    length: Callable[[int], int]
    """Tokens of a ticket's response."""
    step_seconds: Callable[[int], float]
    """Of a decoding step, by how many responses run."""
    swap_seconds: float = 0.0
    slice_seconds: float = 0.1
    version: int = 0
    _running: list[_Response] = field(default_factory=list)

    async def advance(
        self, prompts: pa.RecordBatch | None, weights: int | None
    ) -> tuple[Batch, RolloutReport]:
        if prompts is not None:
            columns = (prompts["ticket"].to_pylist(), prompts["attempt"].to_pylist())
            for ticket, attempt, size in zip(
                *columns, row_lengths(prompts, "prompt_ids"), strict=True
            ):
                self._running.append(_Response(ticket, attempt, int(size), self.length(ticket)))
        start = now()
        if weights is not None and weights > self.version:
            self.version = weights
            await asyncio.sleep(self.swap_seconds)
        swapped = now()
        finished, seconds, sampled = [], 0.0, 0
        while self._running and seconds < self.slice_seconds:
            cost = self.step_seconds(len(self._running))
            # So many steps change nothing but lengths.
            within = int((self.slice_seconds - seconds) / cost) + 1
            steps = min(within, *(response.left for response in self._running))
            seconds += steps * cost
            sampled += steps * len(self._running)
            for response in self._running:
                response.grow(self.version, steps)
            finished += [response for response in self._running if not response.left]
            self._running = [response for response in self._running if response.left]
        await asyncio.sleep(seconds)
        batch = [(r.runs, r.meta(row)) for row, r in enumerate(finished)]
        report = RolloutReport(
            metas=[meta for _, meta in batch],
            version=self.version,
            running=len(self._running),
            sampled_tokens=sampled,
            busy_seconds=now() - swapped,
            sync_seconds=swapped - start,
            cpu_seconds=0.0,
            nbytes=0,
        )
        return batch, report


@dataclass
class ScriptedTeacher:
    """Scores one request at a time; a remote one answers later, and takes the next meanwhile."""

    name: str
    seconds: Callable[[int], float]
    """Of a request, by its tokens."""
    latency: float = 0.0
    _busy: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def score(self, batches: list[Batch]) -> tuple[Batch, ScoreReport]:
        rows = [row for batch in batches for row in batch]
        tokens = sum(meta.tokens for _, meta in rows)
        await asyncio.sleep(self.latency / 2)
        async with self._busy:
            start = now()
            await asyncio.sleep(self.seconds(tokens))
            busy = now() - start
        await asyncio.sleep(self.latency / 2)
        scored = [(runs, replace(meta, row=row)) for row, (runs, meta) in enumerate(rows)]
        return scored, ScoreReport([meta for _, meta in scored], tokens, busy, 0.0, 0)


@dataclass
class ScriptedLearner:
    """Trains on tokens within an age bound, and counts them."""

    bound: int
    seconds: Callable[[int], float]
    """Of a step, by its tokens, prompts' ones included."""
    publish_seconds: float = 0.0
    version: int = 0
    _loaded: dict[int, list[tuple[Runs, RolloutMeta]]] = field(default_factory=dict)

    async def load(self, rows: list[tuple[Batch, list[int]]], version: int) -> None:
        self._loaded[version] = [batch[row] for batch, indices in rows for row in indices]

    async def step(self) -> StepReport:
        batch = self._loaded.pop(self.version)
        start = now()
        await asyncio.sleep(self.seconds(sum(meta.tokens for _, meta in batch)))
        ages: dict[int, int] = {}
        masked = 0
        for version, tokens in (run for runs, _ in batch for run in runs):
            age = self.version - version
            if age > self.bound:
                masked += tokens
            else:
                ages[age] = ages.get(age, 0) + tokens
        trained = sum(ages.values())
        self.version += 1
        metrics = {
            "train/tokens": float(trained),
            "staleness/mean_age": sum(a * n for a, n in ages.items()) / max(1, trained),
            "staleness/max_age": float(max(ages, default=0)),
            "staleness/masked_tokens": float(masked),
        }
        return StepReport(self.version, metrics, ages, trained, now() - start, 0.0)

    async def published(self) -> tuple[int, PublishReport]:
        version = self.version
        await asyncio.sleep(self.publish_seconds)
        return version, PublishReport(version, self.publish_seconds, 0)


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Runs to the end in virtual time: nobody ever waits. Raises RuntimeError where all would wait
    for ever."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(work)


class _VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer."""

    def __init__(self) -> None:
        self._virtual = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self._virtual

    def jump(self, seconds: float | None) -> None:
        if seconds is None:
            raise RuntimeError("deadlock: every task waits for another")
        # As any clock, this one has moved on when it is looked at again: a wait that ends too soon
        # by a rounding error would otherwise be begun again for ever.
        self._virtual += max(0.0, seconds) + CLOCK_TICK


class _Jump(selectors.DefaultSelector):
    def __init__(self, loop: _VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        self._loop.jump(timeout)
        return super().select(0)
