"""Distillation, from prompts to a registered student.

    teacher_cache ‖ evaluate ─► segments of (generate ‖ train) ─► evaluate ─► register

A segment ends with a checkpoint and is the unit of retry: a failed one starts again from the last.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from prefect import Flow, flow
from prefect.artifacts import acreate_markdown_artifact
from prefect.runtime import flow_run

from engine import preflight
from engine.config import RunConfig
from engine.energy import Energy
from engine.evaluation import HELD_OUT, Figures, Outcomes
from engine.nights import digest_of
from engine.preflight import Inputs
from engine.run import Run, TeacherFigures
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


@dataclass
class Distillation:
    """A run with what watches it."""

    run: Run
    tracker: Tracker
    terminal: Terminal
    watch: Stopwatch


@dataclass(frozen=True)
class Outcome:
    """What a distillation has come to."""

    teacher: TeacherFigures
    before: dict[str, Outcomes]
    """By evaluation set, of the student that it started from; with the same seeds as after."""
    after: dict[str, Outcomes]
    joules: float | None
    """Of training; None where the machine doesn't say."""

    @property
    def figures(self) -> tuple[Figures, Figures]:
        """Held-out figures before and after."""
        return self.before[HELD_OUT].figures, self.after[HELD_OUT].figures


def segment_of(run: Run) -> Flow[[int, int], Coroutine[Any, Any, None]]:
    """The flow of this run's segments; Prefect shows its steps, and no object, as parameters."""

    @flow(name="segment", flow_run_name="steps {first}–{last}", validate_parameters=False)
    async def segment(first: int, last: int) -> None:
        """These steps and a checkpoint. Tried again, it starts from the last checkpoint."""
        if flow_run.run_count > 1:
            await run.recover()
        async with asyncio.TaskGroup() as group:  # the death of one ends the other
            group.create_task(generate(run, last))
            group.create_task(train(run, last))
        await run.checkpoint()

    return segment


def run_name() -> str:
    """Of a flow run, as the list in Prefect shows it: flow, model and day."""
    config = flow_run.parameters["config"]
    config = config if isinstance(config, RunConfig) else RunConfig.model_validate(config)
    return f"{flow_run.flow_name} {config.tracking.model_name} {datetime.now(UTC):%Y-%m-%d}"


@flow(name="distill", flow_run_name=run_name)
async def distill(config: RunConfig) -> dict[str, Any]:
    """Distils the teacher into the student and registers the result as `candidate`.

    Returns the run's figures, as `opdflow run --json` writes them."""
    inputs = await asyncio.to_thread(preflight.check, config)
    async with started(config, inputs) as distillation:
        outcome = await distilled(distillation)
        version = await registered(distillation, outcome, {})
        await acreate_markdown_artifact(figure_table(*outcome.figures), key="result")
        return figures_of(distillation, outcome, version)


@asynccontextmanager
async def started(
    config: RunConfig, inputs: Inputs, tags: dict[str, str] | None = None
) -> AsyncIterator[Distillation]:
    """Workers and an MLflow run, which carries these tags, until the block ends."""
    watch = Stopwatch()
    name = f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    run = Run(config, inputs, Path(config.directory) / name)
    terminal = Terminal(config)
    terminal.inputs(inputs)
    try:
        with watch.stage("start"), terminal.stage("starting workers"):
            opening = asyncio.to_thread(Tracker, config, name, tags)
            tracker, _ = await asyncio.gather(opening, run.start())
        with tracker:
            run.listeners += [tracker.step, terminal.step]
            run.symptom_listeners += [tracker.symptom, terminal.symptom]
            yield Distillation(run, tracker, terminal, watch)
    finally:
        terminal.close()
        await asyncio.to_thread(run.close)


async def distilled(distillation: Distillation) -> Outcome:
    """All stages up to the last evaluation."""
    run, tracker, terminal = distillation.run, distillation.tracker, distillation.terminal
    watch, config = distillation.watch, distillation.run.config
    with watch.stage("evaluate before"), terminal.stage("teacher cache, evaluation before"):
        teacher, before = await asyncio.gather(teacher_cache(run), evaluate(run))
    tracker.evaluation(before[HELD_OUT].figures, 0)
    segment, first = segment_of(run), 1
    energy = Energy()
    run.listeners.append(lambda record: energy.read())
    with watch.stage("distil"), terminal.steps():
        for last in _segment_ends(config):
            await segment.with_options(retries=config.checkpoint.retries)(first, last)
            first = last + 1
    with watch.stage("evaluate after"), terminal.stage("evaluation after"):
        after = await evaluate(run)
    tracker.evaluation(after[HELD_OUT].figures, run.steps)
    return Outcome(teacher, before, after, energy.joules)


async def registered(distillation: Distillation, outcome: Outcome, origin: dict[str, str]) -> str:
    """The version under which the student is registered, tagged with what it was made from."""
    run, terminal = distillation.run, distillation.terminal
    tags = origin | {
        "teacher_digest": outcome.teacher.digest,
        "prompts_digest": digest_of(run.trained()),
        "evaluation_digest": digest_of(run.inputs.evaluated),
    }
    with distillation.watch.stage("register"), terminal.stage("registering the student"):
        return await register(run, distillation.tracker, *outcome.figures, tags)


def figures_of(distillation: Distillation, outcome: Outcome, version: str) -> dict[str, Any]:
    """All that is worth keeping of a run, as plain data."""
    run, config = distillation.run, distillation.run.config
    return _figures(run, distillation.watch, *outcome.figures) | {
        "joules_per_million_tokens": outcome.joules and 1e6 * outcome.joules / _trained(run),
        "teacher": asdict(outcome.teacher),
        "model_version": version,
        "model_name": config.tracking.model_name,
        "mlflow_uri": _without_password(tracking_uri(config)),
        "mlflow_run": distillation.tracker.run_id,
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


def figure_table(before: Figures, after: Figures) -> str:
    """Held-out figures as Markdown."""
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
