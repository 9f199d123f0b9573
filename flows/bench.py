"""`opdflow bench`: synchronous, two-step-off and asynchronous training, side by side.

    pools    the demo's models, one core for rollouts and one for teacher and learner, in every arm
    shared   the same, but synchronous stages, which take turns, have all cores each
    remote   scripted workers on the real loop in virtual time: 1 teacher, 4 rollout workers, and a
             learner that takes as long as they do, with long-tailed response lengths

The arms of a seed have the same prompts in the same order, and begin with the same student. Times
are taken between the first and the last EDGE steps, where workers fill up and run dry.
"""

import asyncio
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from engine.config import ConfigError, RunConfig, parse
from engine.evaluation import HELD_OUT, Figures
from engine.loop import Loop, StepRecord
from engine.preflight import Inputs
from engine.prompts import Prompt, PromptStream
from engine.run import Run
from engine.scripted import ScriptedLearner, ScriptedRollouts, ScriptedTeacher, run_virtually
from engine.trace import BUSY, Span, Trace, now
from flows.study import interval

SYNC, STEP_OFF, ASYNC = "synchronous", "two-step-off", "asynchronous"
ARMS: dict[str, dict[str, Any]] = {
    SYNC: {"max": 0},
    STEP_OFF: {"max": 2, "barrier": True},
    ASYNC: {"max": 4},
}
EDGE = 8  # steps
STEPS = 64
Pools = list[list[set[str]]]
"""Workers that share a core, grouped by pool."""


@dataclass(frozen=True)
class Outcome:
    """What became of one arm with one seed."""

    arm: str
    seed: int
    tokens_per_second: float
    """Trained."""
    overlap: float
    """Sum of the pools' busy shares."""
    idle_share: float
    """Of the processors; of the workers where these are scripted."""
    sync_stall_share: float
    """Time that swaps of weights took, over that of generation."""
    overhead: float
    """Wall time over the busiest pool's own work."""
    mean_age: float
    depth: float
    """Responses outstanding at which the controller settled."""
    accuracy: float | None = None
    kl: float | None = None
    """Held-out, after the run."""


@dataclass
class _Clock:
    """Notes what a run does, and when."""

    history: list[StepRecord] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    trace: Trace = field(default_factory=lambda: Trace(kept=None))

    def step(self, record: StepRecord) -> None:
        self.history.append(record)
        self.times.append(now())

    def outcome(self, arm: str, seed: int, pools: Pools, cores: int | None) -> Outcome:
        """Between the edges; processors are counted if there are any."""
        start, end = self.times[EDGE - 1], self.times[-EDGE - 1]
        records, wall = self.history[EDGE:-EDGE], end - start
        spans = [span for span in self.trace.spans if span.end > start and span.start < end]
        busy = [
            mean(_covered(spans, member, start, end) / wall for member in pool) for pool in pools
        ]
        seconds = {
            kind: sum(s.seconds for s in spans if s.kind == kind) for kind in ("swap", "generate")
        }
        tokens = [r.metrics["train/tokens"] for r in records]
        used = sum(busy) / len(pools)
        if cores:
            used = sum(r.metrics["cost/cpu_seconds"] for r in records) / (cores * wall)
        return Outcome(
            arm,
            seed,
            tokens_per_second=sum(tokens) / wall,
            overlap=sum(busy),
            idle_share=1 - used,
            sync_stall_share=seconds["swap"] / seconds["generate"],
            overhead=1 / max(busy),
            mean_age=float(
                np.average([r.metrics["staleness/mean_age"] for r in records], weights=tokens)
            ),
            depth=mean(r.metrics["queue/depth"] for r in records),
        )


def _covered(spans: Iterable[Span], workers: set[str], start: float, end: float) -> float:
    """Seconds within which at least one of these workers was busy."""
    busy = sorted(
        (max(start, s.start), min(end, s.end))
        for s in spans
        if s.worker in workers and s.kind in BUSY
    )
    total, reached = 0.0, start
    for first, last in busy:
        total += max(0.0, last - max(first, reached))
        reached = max(reached, last)
    return total


# Scripted workers


def remote(seeds: int) -> list[Outcome]:
    """The tier `remote`."""
    return [_emulated(arm, seed) for seed in range(seeds) for arm in ARMS]


# Seconds and tokens as of a model of some billion parameters on one GPU for each worker. A decoding
# step reads the weights, which takes a time of its own, and then does something for each response;
# teacher and learner (three GPUs) take as many tokens a second as four rollout workers make.
BATCH = 256
MEDIAN_LENGTH, SIGMA, MAX_LENGTH = 400, 0.8, 2048  # of a log-normal distribution
DECODE_SECONDS, RESPONSE_SECONDS = 0.02, 0.0003
TOKENS_PER_SECOND = 5500
LATENCY = 0.5  # of a teacher's answer
SWAP_SECONDS, PUBLISH_SECONDS = 0.05, 0.2
SLICE_SECONDS = 0.25  # between which weights and prompts are taken in


def _emulated(arm: str, seed: int) -> Outcome:
    lengths = np.random.default_rng(seed).lognormal(
        np.log(MEDIAN_LENGTH), SIGMA, 10 * STEPS * BATCH
    )
    config = parse(
        {
            "student": {"model": "scripted"},
            "teacher": {"model": "scripted"},
            "prompts": {"path": "scripted"},
            "evaluation": {"path": "scripted"},
            "rollout": {"workers": 4, "slots": 64},
            "scoring": {"concurrent": 4},
            "training": {"steps": STEPS, "batch": BATCH},
            "staleness": ARMS[arm],
        },
        "bench",
    )
    rollouts = [
        ScriptedRollouts(
            f"rollout-{index}",
            lambda ticket: int(np.clip(lengths[ticket], 1, MAX_LENGTH)),
            lambda running: DECODE_SECONDS + RESPONSE_SECONDS * running,
            SWAP_SECONDS,
            SLICE_SECONDS,
        )
        for index in range(config.rollout.workers)
    ]
    teacher = ScriptedTeacher("teacher-0", lambda tokens: tokens / TOKENS_PER_SECOND, LATENCY)
    learner = ScriptedLearner(
        config.staleness.max, lambda tokens: tokens / TOKENS_PER_SECOND, PUBLISH_SECONDS
    )
    prompts = PromptStream([Prompt("", "", (0,) * 50, None, "exact")], seed)

    async def run() -> Outcome:
        clock = _Clock()
        loop = Loop(config, prompts, rollouts, [teacher], learner, clock.step, clock.trace)
        await _both(loop, STEPS)
        pools: Pools = [[{worker.name} for worker in rollouts], [{"teacher-0"}], [{"learner"}]]
        return clock.outcome(arm, seed, pools, None)

    return run_virtually(run())


# Models


def real(
    config: RunConfig, inputs: Inputs, seeds: int, shared: bool, console: Console
) -> list[Outcome]:
    """The tiers `pools` and `shared`. Raises ConfigError if too few steps lie between the edges."""
    if config.training.steps <= 2 * EDGE:
        raise ConfigError(
            f"bench: `training.steps` is to be more than {2 * EDGE}: the first and the last {EDGE} "
            "are not measured"
        )
    groups = [([SYNC], True), ([STEP_OFF, ASYNC], False)] if shared else [(list(ARMS), False)]
    outcomes = []
    for arms, all_cores in groups:
        with tempfile.TemporaryDirectory() as folder:
            run = Run(_scheduled(config, ASYNC, 0), inputs, Path(folder), all_cores)
            try:
                outcomes += asyncio.run(_arms(run, config, arms, seeds, console))
            finally:
                run.close()
    return outcomes


async def _arms(
    run: Run, config: RunConfig, arms: Sequence[str], seeds: int, console: Console
) -> list[Outcome]:
    """One after the other on the same workers, which start over each time."""
    await run.start()
    outcomes = []
    for seed in range(seeds):
        for arm in arms:
            clock = _Clock()
            await run.start_over(_scheduled(config, arm, seed), clock.trace)
            run.listeners[:] = [clock.step]
            await run.evaluate()  # which also gives all workers the first weights
            await _both(run.loop, run.steps)
            figures = (await run.evaluate())[HELD_OUT].figures
            outcomes.append(_measured(run, clock, arm, seed, figures))
            speed = outcomes[-1].tokens_per_second
            console.print(f"  seed {seed} {arm:<14} {speed:7.0f} tokens/s, KL {figures.kl:.3f}")
    return outcomes


def _measured(run: Run, clock: _Clock, arm: str, seed: int, figures: Figures) -> Outcome:
    rollouts = {f"rollout-{index}" for index in range(run.config.rollout.workers)}
    teachers = {f"teacher-{index}" for index in range(run.config.scoring.workers)}
    cores = len(os.sched_getaffinity(0))
    outcome = clock.outcome(arm, seed, [[rollouts], [teachers | {"learner"}]], cores)
    return Outcome(**asdict(outcome) | {"accuracy": figures.accuracy, "kl": figures.kl})


def _scheduled(config: RunConfig, arm: str, seed: int) -> RunConfig:
    data = config.model_dump() | {"staleness": ARMS[arm], "seed": seed}
    return parse(data, f"bench, {arm}")


async def _both(loop: Loop, steps: int) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(loop.generate(steps))
        group.create_task(loop.train(steps))


# Results


def figures(tier: str, outcomes: list[Outcome]) -> dict[str, Any]:
    """As `opdflow bench --json` writes them: means over seeds, with half a 95 % interval."""
    ours = _of(outcomes, ASYNC)
    values = {
        "async_over_sync": _ratios(outcomes, SYNC),
        "async_over_step_off": _ratios(outcomes, STEP_OFF),
        "overlap": [each.overlap for each in ours],
        "idle_share": [each.idle_share for each in ours],
        "sync_stall_share": [each.sync_stall_share for each in ours],
        "overhead": [each.overhead for each in ours],
    }
    summary = {name: _spread(each) for name, each in values.items()}
    return {tier: summary, "runs": [asdict(outcome) for outcome in outcomes]}


def show(tier: str, outcomes: list[Outcome], console: Console) -> None:
    """The table: a row for each arm, and what asynchrony gains."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = {
        "tokens_per_second": ("tokens/s", 0),
        "overlap": ("overlap", 2),
        "idle_share": ("idle", 2),
        "sync_stall_share": ("swaps", 4),
        "overhead": ("overhead", 2),
        "mean_age": ("age", 2),
        "accuracy": ("accuracy", 3),
        "kl": ("KL", 3),
    }
    if tier == "remote":
        columns = {key: value for key, value in columns.items() if key not in ("accuracy", "kl")}
    table.add_column(tier, no_wrap=True)
    for title, _ in columns.values():
        table.add_column(title, justify="right", no_wrap=True)
    for arm in ARMS:
        rows = [asdict(outcome) for outcome in _of(outcomes, arm)]
        cells = [_text([row[key] for row in rows], digits) for key, (_, digits) in columns.items()]
        table.add_row(arm, *cells)
    console.print()
    console.print(table)
    console.print()
    for arm in (SYNC, STEP_OFF):
        gain = _text(_ratios(outcomes, arm), 2)
        console.print(f"asynchronous over {arm}: {gain} times the tokens per second")


def plot(tier: str, outcomes: list[Outcome]) -> Figure:
    """Trained tokens per second and overlap of each arm, with 95 % intervals over seeds."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = (("tokens_per_second", "trained tokens/s"), ("overlap", "overlap (busy pools)"))
    for axes, (key, title) in zip(figure.subplots(1, 2), panels, strict=True):
        spreads = [interval([asdict(each)[key] for each in _of(outcomes, arm)]) for arm in ARMS]
        heights, halves = zip(*spreads, strict=True)
        axes.bar(list(ARMS), heights, yerr=halves, capsize=4, color=["C7", "C1", "C0"])
        axes.set_title(f"{tier}: {title}")
    return figure


def _of(outcomes: list[Outcome], arm: str) -> list[Outcome]:
    return sorted((o for o in outcomes if o.arm == arm), key=lambda outcome: outcome.seed)


def _ratios(outcomes: list[Outcome], arm: str) -> list[float]:
    pairs = zip(_of(outcomes, ASYNC), _of(outcomes, arm), strict=True)
    return [ours.tokens_per_second / theirs.tokens_per_second for ours, theirs in pairs]


def _spread(values: list[float]) -> dict[str, Any]:
    middle, half = interval(values)
    return {"mean": middle, "half_interval": half, "values": values}


def _text(values: list[float], digits: int) -> str:
    middle, half = interval(values)
    return f"{middle:.{digits}f}" + (f" ± {half:.{digits}f}" if len(values) > 1 else "")
