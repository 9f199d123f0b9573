"""The stages of a distillation as Prefect tasks.

A task is never one optimizer step, and a batch is never a task's argument. `generate` and `train`
are two task runs at the same time; the run object that they share is passed by reference and never
hashed.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from prefect import task
from prefect.artifacts import (
    acreate_markdown_artifact,
    acreate_progress_artifact,
    aupdate_progress_artifact,
)
from prefect.cache_policies import NO_CACHE

from engine.evaluation import Figures, Outcomes
from engine.run import Run, TeacherFigures
from tasks.tracking import Tracker

PROGRESS_SECONDS = 2.0


@task(name="teacher cache", cache_policy=NO_CACHE)
async def teacher_cache(run: Run) -> TeacherFigures:
    """The teacher's answers to the held-out prompts and their scores, by content."""
    return await run.teacher_answers()


@task(cache_policy=NO_CACHE)
async def generate(run: Run, until: int) -> None:
    """Rollouts and scores for a segment, until the learner has made step `until`."""
    await _watched(run.generate(until), await _progress("generate", run, until))


@task(cache_policy=NO_CACHE)
async def train(run: Run, until: int) -> None:
    """The learner's steps of a segment, and what is wrong with them."""
    await _watched(run.train(until), await _progress("train", run, until), _health(run))


@task(cache_policy=NO_CACHE)
async def evaluate(run: Run) -> dict[str, Outcomes]:
    """The current student on the held-out prompts and the gate's guards."""
    return await run.evaluate()


@task(cache_policy=NO_CACHE)
async def register(
    run: Run, tracker: Tracker, before: Figures, after: Figures, origin: dict[str, str]
) -> str:
    """The checkpoint as a registered model version with alias `candidate`."""
    await asyncio.to_thread(tracker.plots, run.history, run.loop.trace.spans, before, after)
    return await asyncio.to_thread(tracker.register, run.student_folder, before, after, origin)


Report = Callable[[], Coroutine[Any, Any, None]]
"""Brings something in Prefect up to date."""


async def _watched(work: Coroutine[Any, Any, None], *reports: Report) -> None:
    """Does the work, and reports all the while."""
    reporter = asyncio.create_task(_repeat(reports))
    try:
        await work
    finally:
        reporter.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reporter
    for report in reports:
        await report()


async def _repeat(reports: Sequence[Report]) -> None:
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        for report in reports:
            await report()


async def _progress(name: str, run: Run, until: int) -> Report:
    """A stage's progress artifact."""
    first = run.loop.version
    description = f"{name}: steps {first} to {until} of {run.steps}"
    artifact: Any = await acreate_progress_artifact(0.0, key=name, description=description)

    async def report() -> None:
        percent = 100.0 * (run.loop.version - first) / max(1, until - first)
        await aupdate_progress_artifact(artifact, percent)

    return report


def _health(run: Run) -> Report:
    """An artifact that says what the guard has noticed; none of a healthy run."""
    told = len(run.symptoms)

    async def report() -> None:
        nonlocal told
        if len(run.symptoms) > told:
            told = len(run.symptoms)
            lines = "\n".join(f"- {symptom.text}" for symptom in run.symptoms)
            description = "the run has left its healthy range"
            await acreate_markdown_artifact(lines, key="health", description=description)

    return report
