"""Whole runs on Ray: the actors, the loop, checkpoints and recovery, with tiny models.

One run goes through everything once; the tests look at what it wrote down on the way.
"""

import asyncio
import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.cluster import Cluster, WorkerStartError, ray
from engine.config import RunConfig
from engine.evaluation import HELD_OUT, Figures, evaluate
from engine.loop import StepRecord
from engine.preflight import Inputs, check
from engine.run import Run, TeacherFigures
from tests.engine.tiny import run_config

BATCH = 8
STEPS = 4
RELATIVE = Path("runs") / "one"


@dataclass
class Story:
    """What the run's driver saw."""

    teacher: list[TeacherFigures] = field(default_factory=list)
    figures: list[Figures] = field(default_factory=list)
    files: list[set[str]] = field(default_factory=list)
    """All files before and after a segment."""
    error: BaseException | None = None
    recovered_at: int = -1
    history_after_recovery: list[int] = field(default_factory=list)
    history: list[StepRecord] = field(default_factory=list)
    heard: list[int] = field(default_factory=list)
    """Steps that a listener was told of."""
    folders: list[str] = field(default_factory=list)
    waiting: list[tuple[int, int]] = field(default_factory=list)
    cursor: int = -1
    leases: int = -1
    buffered: int = -1
    ray_lives_on: bool = False


def write_prompts(path: Path, texts: list[str]) -> str:
    rows = [json.dumps({"id": text, "text": text, "answer": "a"}) for text in texts]
    path.write_text("\n".join(rows) + "\n")
    return str(path)


def config_of(folder: Path, student: Path, teacher: Path) -> RunConfig:
    texts = [f"{a} + {b} =" for a in range(10) for b in range(5)]
    return run_config(
        student,
        teacher,
        prompts={"path": write_prompts(folder / "prompts.jsonl", texts)},
        evaluation={"path": write_prompts(folder / "evaluation.jsonl", texts[:12])},
        training={"steps": STEPS, "batch": BATCH},
        rollout={"backend": "hf", "max_new_tokens": 12, "slots": 8},
        optimizer={"lr": 0.03, "warmup_steps": 0},
        directory=str(folder / "runs"),
        checkpoint={"keep": 2},
        seed=5,
    )


def files_under(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


async def segment(run: Run, until: int) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(run.generate(until))
        group.create_task(run.train(until))


async def tell(run: Run, folder: Path) -> Story:
    story = Story()
    run.listeners.append(lambda record: story.heard.append(record.step))
    await run.start()
    story.teacher = [await run.teacher_answers(), await run.teacher_answers()]
    story.figures.append((await run.evaluate())[HELD_OUT].figures)

    story.files.append(files_under(folder))
    await segment(run, 2)
    story.files.append(files_under(folder))
    await run.checkpoint()

    def kill_learner(record: StepRecord) -> None:
        if record.step == 3 and story.error is None:
            ray.kill(run._cluster.learner.actor)

    run.listeners.append(kill_learner)
    try:
        await asyncio.wait_for(segment(run, STEPS), 120)
    except* ray.exceptions.RayActorError as group:
        story.error = group
    story.recovered_at = await run.recover()
    story.history_after_recovery = [record.step for record in run.history]

    await segment(run, STEPS)
    await run.checkpoint()
    story.figures.append((await run.evaluate())[HELD_OUT].figures)
    position = run.loop.position()
    story.waiting, story.cursor = position.waiting, position.cursor
    story.leases, story.buffered = len(run.loop.permits.leases), len(run.loop.buffer)
    story.history = run.history
    story.folders = [path.name for path in sorted((run.folder / "checkpoints").iterdir())]
    return story


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def inputs(place, tiny_student, tiny_teacher) -> Inputs:
    return check(config_of(place, tiny_student, tiny_teacher))


@pytest.fixture(scope="module")
def story(ray_session, place, inputs, tiny_student, tiny_teacher) -> Story:
    config = config_of(place, tiny_student, tiny_teacher)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        run = Run(config, inputs, RELATIVE)  # relative to here, and not to where Ray was started
        try:
            story = asyncio.run(tell(run, place))
        finally:
            run.close()
    story.ray_lives_on = ray.is_initialized()
    return story


def test_a_run_makes_its_steps_and_tells_its_listeners(story):
    assert [record.step for record in story.history] == [1, 2, 3, 4]
    assert story.heard == [1, 2, 3, 3, 4]  # the third was lost with the learner, and made again


def test_no_token_beyond_the_bound_is_trained_on(story):
    for record in story.history:
        assert record.metrics["staleness/max_age"] <= 1
        assert set(record.age_tokens) <= {0, 1}
        assert sum(record.age_tokens.values()) == record.metrics["train/tokens"] > 0


def test_rollouts_carry_the_logprobs_that_the_learner_finds_through_swaps_and_recovery(story):
    assert all(record.metrics["policy/ratio_deviation"] < 1e-3 for record in story.history)


def test_every_prompt_that_was_started_was_trained_on_exactly_once(story):
    assert story.cursor == STEPS * BATCH
    assert (story.waiting, story.leases, story.buffered) == ([], 0, 0)


def test_batches_never_become_files(story):
    before, after = story.files
    assert before == after
    assert not any("buffer" in name for name in before)


def test_the_teachers_answers_are_made_once_and_then_read(story):
    first, second = story.teacher
    assert (first.cached, second.cached) == (False, True)
    assert first.alignment < 1e-3
    assert dataclasses.replace(second, cached=False) == first
    assert first.mean_length > 0


def test_the_student_came_closer_to_the_teacher(story):
    before, after = story.figures
    assert 0 < after.kl < 0.8 * before.kl
    assert before.accuracy is not None


def test_the_figures_are_those_of_an_evaluator_that_shares_nothing_with_the_run(
    story, place, inputs, tiny_student, tiny_teacher
):
    trained = place / RELATIVE / "checkpoints" / f"step-{STEPS:06d}" / "model"
    for figures, folder in zip(story.figures, (tiny_student, trained), strict=True):
        # Other samples of the same model on the same prompts: near, and not the same.
        independent = [
            evaluate(folder, tiny_teacher, inputs.evaluation * 4, max_new_tokens=12, seed=seed)
            for seed in range(2)
        ]
        kls = [other.kl for other in independent]
        assert figures.kl == pytest.approx(sum(kls) / 2, rel=0.25)


def test_a_dead_actor_ends_the_segment_and_the_run_recovers_at_its_checkpoint(story):
    assert story.error is not None, "no actor's death was reported"
    assert story.recovered_at == 2
    assert story.history_after_recovery == [1, 2]


def test_the_last_checkpoints_are_kept_whole(story, place):
    assert story.folders == ["step-000002", "step-000004"]
    folder = place / RELATIVE / "checkpoints"
    one, other = (load_file(folder / n / "model" / "model.safetensors") for n in story.folders)
    assert one.keys() == other.keys()
    assert not any(torch.equal(one[name], other[name]) for name in one)


def test_a_run_leaves_a_ray_that_it_did_not_start(story):
    assert story.ray_lives_on


def test_a_worker_that_cannot_start_is_named(ray_session, place, inputs, tiny_student, tmp_path):
    broken = tmp_path / "teacher"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "nonsense"}')
    config = config_of(place, tiny_student, broken)
    cluster = Cluster(config, dataclasses.replace(inputs, teacher=broken))
    try:
        with pytest.raises(WorkerStartError, match=r"teacher-0 didn't start.*"):
            asyncio.run(cluster.start())
    finally:
        cluster.close()
