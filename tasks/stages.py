"""The stages of a distillation as Prefect tasks.

A task is never one optimizer step, and a batch is never a task's argument. `generate` and `train`
are two task runs at the same time; the run object that they share is passed by reference and never
hashed.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from prefect import task
from prefect.artifacts import acreate_progress_artifact, aupdate_progress_artifact
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
    await _with_progress(run.generate(until), "generate", run, until)


@task(cache_policy=NO_CACHE)
async def train(run: Run, until: int) -> None:
    """The learner's steps of a segment."""
    await _with_progress(run.train(until), "train", run, until)


@task(cache_policy=NO_CACHE)
async def evaluate(run: Run) -> dict[str, Outcomes]:
    """The current student on the held-out prompts and the gate's guards."""
    return await run.evaluate()


@task(cache_policy=NO_CACHE)
async def register(
    run: Run, tracker: Tracker, before: Figures, after: Figures, origin: dict[str, str]
) -> str:
    """The checkpoint as a registered model version with alias `candidate`."""
    await asyncio.to_thread(tracker.plots, run.history, before, after)
    return await asyncio.to_thread(tracker.register, run.student_folder, before, after, origin)


async def _with_progress(work: Coroutine[Any, Any, None], name: str, run: Run, until: int) -> None:
    """Runs a stage, and keeps its progress artifact up to date."""
    first = run.loop.version

    def percent() -> float:
        return 100.0 * (run.loop.version - first) / max(1, until - first)

    description = f"{name}: steps {first} to {until} of {run.steps}"
    artifact: Any = await acreate_progress_artifact(0.0, key=name, description=description)
    reporter = asyncio.create_task(_report(artifact, percent))
    try:
        await work
    finally:
        reporter.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reporter
    await aupdate_progress_artifact(artifact, percent())


async def _report(artifact: Any, percent: Callable[[], float]) -> None:
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        await aupdate_progress_artifact(artifact, percent())
