"""Distillation, from prompts to a registered student.

    teacher_cache ‖ evaluate ─► segments of (generate ‖ train) ─► evaluate ─► register

A segment ends with a checkpoint and is the unit of retry: a failed one starts again from the last.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")
# Without a server of its own, Prefect starts one for the run: slowly, on a small machine.
os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")

from prefect import flow
from prefect.artifacts import acreate_markdown_artifact
from prefect.runtime import flow_run

from engine import preflight
from engine.config import RunConfig
from engine.energy import Energy
from engine.evaluation import HELD_OUT, Figures
from engine.run import Run
from flows.terminal import Terminal
from tasks.stages import evaluate, generate, register, teacher_cache, train
from tasks.tracking import Tracker, tracking_uri


@dataclass
class Stopwatch:
    """Wall time by stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@flow(name="segment", validate_parameters=False)
async def segment(run: Run, until: int) -> None:
    """Steps up to `until`, and a checkpoint. Tried again, it starts from the last checkpoint."""
    if flow_run.run_count > 1:
        await run.recover()
    async with asyncio.TaskGroup() as group:  # the death of one ends the other
        group.create_task(generate(run, until))
        group.create_task(train(run, until))
    await run.checkpoint()


@flow(name="distill")
async def distill(config: RunConfig) -> dict[str, Any]:
    """Distils the teacher into the student and registers the result as `candidate`.

    Returns the run's figures, as `opdflow run --json` writes them."""
    watch = Stopwatch()
    inputs = await asyncio.to_thread(preflight.check, config)
    name = f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    run = Run(config, inputs, Path(config.directory) / name)
    terminal = Terminal(config)
    terminal.inputs(inputs)
    try:
        with watch.stage("start"), terminal.stage("starting workers"):
            opening = asyncio.to_thread(Tracker, config, name)
            tracker, _ = await asyncio.gather(opening, run.start())
        with tracker:
            run.listeners += [tracker.step, terminal.step]
            run.symptom_listeners += [tracker.symptom, terminal.symptom]
            return await _stages(run, tracker, watch, terminal)
    finally:
        terminal.close()
        await asyncio.to_thread(run.close)


async def _stages(
    run: Run, tracker: Tracker, watch: Stopwatch, terminal: Terminal
) -> dict[str, Any]:
    config = run.config
    with watch.stage("evaluate before"), terminal.stage("teacher cache, evaluation before"):
        teacher, outcomes = await asyncio.gather(teacher_cache(run), evaluate(run))
    before = outcomes[HELD_OUT].figures
    tracker.evaluation(before, 0)
    energy = Energy()
    run.listeners.append(lambda record: energy.read())
    with watch.stage("distil"), terminal.steps():
        for until in _segment_ends(config):
            await segment.with_options(retries=config.checkpoint.retries)(run, until)
    with watch.stage("evaluate after"), terminal.stage("evaluation after"):
        after = (await evaluate(run))[HELD_OUT].figures
    tracker.evaluation(after, run.steps)
    with watch.stage("register"), terminal.stage("registering the student"):
        version = await register(run, tracker, run.student_folder, before, after)
    await acreate_markdown_artifact(_table(before, after), key="result")
    return _figures(run, watch, before, after) | {
        "joules_per_million_tokens": energy.joules and 1e6 * energy.joules / _trained(run),
        "teacher": asdict(teacher),
        "model_version": version,
        "model_name": config.tracking.model_name,
        "mlflow_uri": _without_password(tracking_uri(config)),
        "mlflow_run": tracker.run_id,
    }


def _segment_ends(config: RunConfig) -> list[int]:
    steps, every = config.training.steps, config.checkpoint.every
    return [*range(every, steps, every), steps]


def _figures(run: Run, watch: Stopwatch, before: Figures, after: Figures) -> dict[str, Any]:
    trained = _trained(run)
    watch.seconds["total"] = sum(watch.seconds.values())
    return {
        "before": asdict(before),
        "after": asdict(after),
        "seconds": dict(watch.seconds),
        "trained_tokens": trained,
        "trained_tokens_per_second": trained / watch.seconds["distil"],
        "max_age": max(record.metrics["staleness/max_age"] for record in run.history),
        "mean_age": sum(
            r.metrics["staleness/mean_age"] * r.metrics["train/tokens"] for r in run.history
        )
        / trained,
        "masked_tokens": sum(r.metrics["staleness/masked_tokens"] for r in run.history),
        "symptoms": [asdict(symptom) for symptom in run.symptoms],
        "settled_depth": median(
            r.metrics["queue/depth"] for r in run.history[len(run.history) // 2 :]
        ),
        "cpu_seconds_per_million_tokens": 1e6
        * sum(r.metrics["cost/cpu_seconds"] for r in run.history)
        / trained,
        "ratio_deviation": run.history[0].metrics["policy/ratio_deviation"],
        "busy": {
            role: sum(r.metrics[f"busy/{role}"] for r in run.history) / len(run.history)
            for role in ("rollout", "teacher", "learner")
        },
        "steps": run.steps,
        "run_directory": str(run.folder.absolute()),
        "student": str(run.student_folder.absolute()),
    }


def _trained(run: Run) -> float:
    """Tokens."""
    return sum(record.metrics["train/tokens"] for record in run.history)


def _table(before: Figures, after: Figures) -> str:
    rows = [
        f"| {name} | {_number(old)} | {_number(asdict(after)[name])} |"
        for name, old in asdict(before).items()
    ]
    return "\n".join(["| held-out | before | after |", "|---|---|---|", *rows])


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _without_password(uri: str) -> str:
    scheme, _, rest = uri.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if "@" in rest else uri
