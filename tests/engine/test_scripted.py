"""The real loop and its controller of depth on scripted workers, in virtual time: an hour of a
cluster in a second, the same in every run."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import RunConfig, parse
from engine.loop import Loop, StepRecord
from engine.prompts import PromptStream
from engine.scripted import (
    Batch,
    ScriptedLearner,
    ScriptedRollouts,
    ScriptedTeacher,
    run_virtually,
)
from engine.staleness import Stage
from engine.trace import Trace, now
from tests.engine.fakes import prompts, run_config


class ConservingLoop(Loop):
    """Checks after every event that no permit was lost or made."""

    events = 0

    def _notify(self) -> None:
        self.events += 1
        permits = self.permits
        assert permits.free >= 0
        assert permits.free + sum(permits.count(stage) for stage in Stage) == permits.total
        super()._notify()


@dataclass
class Learner(ScriptedLearner):
    """Remembers what it trained on."""

    lengths: dict[int, int] = field(default_factory=dict)
    """By ticket."""

    async def load(self, rows: list[tuple[Batch, list[int]]], version: int) -> None:
        await super().load(rows, version)
        for _, meta in self._loaded[version]:
            assert meta.ticket not in self.lengths, "no response is trained twice"
            self.lengths[meta.ticket] = meta.response_tokens


class Scenario:
    """A run that was made in virtual time. Costs are in seconds; `slow(name, time)` multiplies."""

    def __init__(
        self,
        config: RunConfig,
        *,
        length: Callable[[int], int] = lambda ticket: 100,
        rollouts: int = 4,
        teachers: int = 1,
        token_seconds: float = 1e-4,
        teacher_seconds: float = 1e-4,
        latency: float = 0.0,
        swap: float = 0.0,
        publish: float = 0.0,
        slow: Callable[[str, float], float] = lambda name, time: 1.0,
        trace: Callable[[], Trace] = Trace,
    ) -> None:
        self.records: list[StepRecord] = []
        self.times: list[float] = []
        workers = [
            ScriptedRollouts(
                name,
                length,
                lambda running, name=name: (0.02 + 0.0003 * running) * slow(name, now()),
                swap,
            )
            for name in (f"rollout-{index}" for index in range(rollouts))
        ]
        judges = [
            ScriptedTeacher(
                name, lambda n, name=name: n * teacher_seconds * slow(name, now()), latency
            )
            for name in (f"teacher-{index}" for index in range(teachers))
        ]
        self.learner = Learner(
            config.staleness.max, lambda n: n * token_seconds * slow("learner", now()), publish
        )

        async def run() -> None:
            self.loop = ConservingLoop(
                config,
                PromptStream(prompts(), 0),
                workers,
                judges,
                self.learner,
                self._record,
                trace(),
            )
            async with asyncio.TaskGroup() as group:
                group.create_task(self.loop.generate(config.training.steps))
                group.create_task(self.loop.train(config.training.steps))

        run_virtually(run())
        assert self.loop.version == config.training.steps
        assert self.loop.permits.leases == {}

    def _record(self, record: StepRecord) -> None:
        self.records.append(record)
        self.times.append(now())

    def column(self, metric: str) -> list[float]:
        return [record.metrics[metric] for record in self.records]

    def speed(self, first: int, last: int) -> float:
        """Tokens trained per second between two steps."""
        tokens = sum(self.column("train/tokens")[first:last])
        return tokens / (self.times[last - 1] - self.times[first - 1])


def long_tailed(ticket: int) -> int:
    """Median 100, one in twenty 1,000: in no order."""
    return 1000 if ticket * 37 % 20 == 0 else 60 + ticket * 29 % 80


def config(steps: int = 60, batch: int = 32, **options) -> RunConfig:
    return run_config(
        **{"budget": 2000, "flush": 0.1, "stale": 4} | options, steps=steps, batch=batch
    )


# Time


def test_a_wait_takes_no_time_and_the_clock_shows_it():
    async def nap() -> float:
        start = now()
        await asyncio.sleep(3600)
        return now() - start

    assert run_virtually(nap()) == pytest.approx(3600)


def test_a_deadlock_is_an_error_at_once():
    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="deadlock"):
        run_virtually(wait())


def test_the_loop_waits_for_a_busy_teacher_without_looking_again_and_again():
    # Few rollouts, which don't fill a request, wait longer than the flush time for a teacher that
    # is busy. Looking at the clock until it is free would take some 1e9 looks a second.
    run = Scenario(config(steps=6, batch=4, budget=10**6), teacher_seconds=0.05)
    assert run.loop.events < 1000


# Whole runs


@settings(max_examples=40)
@given(
    stale=st.sampled_from([0, 1, 4]),
    older=st.sampled_from(["mask", "drop", "wait"]),
    barrier=st.booleans(),
    batch=st.integers(1, 9),
    slots=st.integers(1, 8),
    concurrent=st.integers(1, 3),
    lengths=st.lists(st.sampled_from([1, 30, 100, 2000]), min_size=1, max_size=9),
    slow=st.dictionaries(
        st.sampled_from(["rollout-0", "rollout-1", "teacher-0", "learner"]),
        st.sampled_from([0.1, 10.0, 100.0]),
    ),
    latency=st.sampled_from([0.0, 5.0]),
    swap=st.sampled_from([0.0, 3.0]),
    publish=st.sampled_from([0.0, 9.0]),
)
def test_whatever_is_slow_permits_are_conserved_and_no_token_is_older_than_the_bound(
    stale, older, barrier, batch, slots, concurrent, lengths, slow, latency, swap, publish
):
    run = Scenario(
        config(
            steps=8,
            batch=batch,
            stale=stale,
            older=older,
            barrier=barrier,
            slots=slots,
            concurrent=concurrent,
        ),
        length=lambda ticket: lengths[ticket % len(lengths)],
        rollouts=2,
        latency=latency,
        swap=swap,
        publish=publish,
        slow=lambda name, time: slow.get(name, 1.0),
    )
    assert max(run.column("staleness/max_age")) <= stale
    if older == "wait":
        assert sum(run.column("staleness/masked_tokens")) == 0


@pytest.mark.parametrize("stale", [0, 1, 4])
@pytest.mark.parametrize("barrier", [False, True])
def test_with_queues_of_one_a_run_comes_to_its_end(stale, barrier):
    options = {"stale": stale, "barrier": barrier, "slots": 1, "concurrent": 1, "budget": 1}
    run = Scenario(config(steps=9, batch=1, **options), length=long_tailed, rollouts=3, latency=2.0)
    assert sorted(run.learner.lengths) == list(range(9))


# The controller of depth


def settled(run: Scenario) -> float:
    depths = run.column("queue/depth")
    return sum(depths[-40:-10]) / 30


@pytest.mark.parametrize("token_seconds", [3e-4, 6e-4])
def test_the_depth_settles_where_the_learner_is_busy_and_well_below_the_bound(token_seconds):
    run = Scenario(config(steps=80, stale=15), length=long_tailed, token_seconds=token_seconds)
    steady = run.column("queue/depth")[-40:-10]
    assert max(steady) - min(steady) <= 32, "it moves by less than a batch"
    assert settled(run) < 0.5 * run.loop.permits.total
    waits = run.column("wait/learner")[-40:-10]
    assert sum(waits) / len(waits) < 0.05


def test_a_faster_learner_is_given_more():
    slow = Scenario(config(steps=80, stale=15), length=long_tailed, token_seconds=6e-4)
    fast = Scenario(config(steps=80, stale=15), length=long_tailed, token_seconds=2e-4)
    assert settled(fast) > 1.2 * settled(slow)


def test_before_a_slow_teacher_nothing_piles_up():
    run = Scenario(config(steps=80, stale=15), length=long_tailed, teacher_seconds=5e-4)
    assert settled(run) < 0.5 * run.loop.permits.total
    busy = run.column("busy/teacher")[-40:-10]
    assert sum(busy) / len(busy) > 0.95, "though it is never kept waiting"


@pytest.mark.parametrize("who", ["rollout-0", "teacher-0", "learner"])
def test_a_run_recovers_from_a_worker_that_is_ten_times_as_slow_for_a_while(who):
    run = Scenario(
        config(steps=200, stale=8),
        length=long_tailed,
        token_seconds=3e-4,
        slow=lambda name, time: 10.0 if name == who and 100 < time < 130 else 1.0,
    )
    before = next(step for step, time in enumerate(run.times) if time > 100)
    after = next(step for step, time in enumerate(run.times) if time > 200)
    assert before < after < 170
    assert run.speed(after, 190) > 0.95 * run.speed(10, before)
    depths = run.column("queue/depth")
    assert abs(sum(depths[-30:-10]) / 20 - depths[before - 1]) <= 32


def test_a_forced_depth_stays_and_the_controllers_decisions_are_in_the_trace(tmp_path):
    free = config(steps=20, stale=8)
    forced = parse(
        free.model_dump() | {"staleness": free.staleness.model_dump() | {"depth": 50}}, "a test"
    )
    for which, marks in ((free, True), (forced, False)):
        path = tmp_path / f"{marks}.json"
        run = Scenario(which, length=long_tailed, trace=lambda path=path: Trace(path))
        assert ("depth 64 " in path.read_text()) == marks
        if not marks:
            assert set(run.column("queue/depth")) == {50}


# Which responses


def test_what_is_trained_is_as_long_as_what_was_asked_for():
    run = Scenario(config(steps=40, stale=4), length=long_tailed, token_seconds=3e-4)
    assert run.learner.lengths == {ticket: long_tailed(ticket) for ticket in range(40 * 32)}


def test_a_long_response_waits_no_longer_for_the_learner_than_a_short_one():
    run = Scenario(config(steps=80, stale=15), length=long_tailed, token_seconds=6e-4)
    step_seconds = (run.times[60] - run.times[20]) / 40
    assert max(run.column("queue/training_wait_p95")[20:60]) < 3 * step_seconds
    tokens = run.column("train/response_tokens")[20:60]
    expected = sum(map(long_tailed, range(2000))) / 2000
    assert sum(tokens) / len(tokens) == pytest.approx(expected, rel=0.03)
