"""All of Ray: the cluster, the actors, and where they run.

The workers are plain classes; here each is put at the edge of a process. Batches and weights are
values that an actor's method returns, so the driver owns them and they outlive the actor that made
them. Actors return a batch and a small report as two objects: the driver reads the report only.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Ray reads these when it is imported or starts: no usage reports, no `uv run` around its workers,
# and the priority of an ordinary process for them, for they do the work.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_worker_niceness", "0")

import numpy as np
import pyarrow as pa
import ray

from engine.backends import vllm_environment
from engine.config import Cache, RunConfig, TeacherHidden
from engine.learner import LearnerWorker, PublishReport, StepReport
from engine.models import Language, pick_device, pick_dtype, stop_ids
from engine.preflight import Inputs
from engine.rollout import RolloutReport, RolloutWorker
from engine.schema import RolloutMeta
from engine.scoring import ScoreReport, TeacherWorker
from engine.weights import Weights

START_SECONDS = 600.0  # loading a large model from a slow disk


class WorkerStartError(RuntimeError):
    """A worker didn't come up. The message names it and its error."""


class RolloutActor:
    """A rollout worker in its own process."""

    def __init__(
        self, config: RunConfig, folder: Path, cores: list[int], index: int, max_length: int
    ) -> None:
        _pin(cores)
        rollout = config.rollout
        device = pick_device()
        dtype = pick_dtype(config.student.dtype, device)
        seed = config.seed * 1000 + index  # workers must not sample alike
        if rollout.backend == "hf":
            language = Language(folder, dtype, device, config.student.trust_remote_code)
            tokenizer = language.tokenizer
            sampler: Any = language.sampler(rollout.temperature, rollout.slots)
        else:
            from engine.backends.vllm import VLLMSampler
            from engine.models import load_tokenizer

            tokenizer = load_tokenizer(folder, config.student.trust_remote_code)
            sampler = VLLMSampler(
                str(folder),
                len(tokenizer),
                stop_ids(folder, tokenizer),
                rollout.temperature,
                rollout.slots,
                max_length,
                rollout.memory_gib,
                dtype,
                config.student.trust_remote_code,
                seed,
            )
        self._worker = RolloutWorker(
            sampler,
            lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
            config.estimator.cache,
            rollout.max_new_tokens,
            seed,
            rollout.swap == "reprefill",
        )

    def ready(self) -> None:
        """Answers when the model is loaded."""

    @ray.method(num_returns=2)
    def advance(
        self, prompts: pa.RecordBatch | None, weights: Weights | None
    ) -> tuple[pa.RecordBatch, RolloutReport]:
        return self._worker.advance(prompts, weights)

    def rehearse(self, weights: Weights) -> None:
        self._worker.rehearse(weights)

    @ray.method(num_returns=2)
    def generate(
        self, prompts: pa.RecordBatch, weights: Weights | None
    ) -> tuple[pa.RecordBatch, RolloutReport]:
        return self._worker.generate(prompts, weights)


class TeacherActor:
    """A teacher worker in its own process."""

    def __init__(self, config: RunConfig, folder: Path, cores: list[int]) -> None:
        _pin(cores)
        device = pick_device()
        dtype = pick_dtype(config.teacher.dtype, device)
        teacher = Language(folder, dtype, device, config.teacher.trust_remote_code)
        self._config = config
        self._worker = TeacherWorker(
            teacher, config.teacher.temperature, config.scoring.token_budget, config.seed
        )

    def ready(self) -> None:
        """Answers when the model is loaded."""

    @ray.method(num_returns=2)
    def score(
        self, cache: Cache, rows: list[int] | None, *batches: pa.RecordBatch
    ) -> tuple[pa.RecordBatch, ScoreReport]:
        return self._worker.score(list(batches), cache, rows)

    def head(self) -> Weights:
        return self._worker.head()

    @ray.method(num_returns=2)
    def answer(self, prompts: pa.RecordBatch) -> tuple[pa.RecordBatch, RolloutReport]:
        rollout = self._config.rollout
        return self._worker.answer(
            prompts, rollout.max_new_tokens, rollout.slots, self._config.seed
        )


class LearnerActor:
    """The learner in its own process."""

    def __init__(self, config: RunConfig, folder: Path, cores: list[int]) -> None:
        import torch

        _pin(cores)
        device = pick_device()
        dtype = pick_dtype(config.student.dtype, device)
        # Master weights and the optimizer's state are float32, whatever is computed in.
        student = Language(folder, torch.float32, device, config.student.trust_remote_code)
        self._worker = LearnerWorker(student, dtype, config)

    def ready(self) -> None:
        """Answers when the model is loaded."""

    def imitate(self, teacher: Path, head: Weights) -> None:
        self._worker.imitate(teacher, head)

    @ray.method(concurrency_group="load")
    def load(self, rows: list[list[int]], version: int, *batches: pa.RecordBatch) -> None:
        self._worker.load(list(batches), rows, version)

    def step(self) -> StepReport:
        return self._worker.step()

    def divergence(self, rows: list[list[int]], *batches: pa.RecordBatch) -> np.ndarray:
        return self._worker.divergence(list(batches), rows)

    @ray.method(num_returns=2, concurrency_group="publish")
    def published(self) -> tuple[Weights, PublishReport]:
        return self._worker.published()

    def save(self, folder: Path, rows: list[list[int]], *batches: pa.RecordBatch) -> None:
        self._worker.save(folder, list(batches), rows)

    @ray.method(num_returns=3)
    def restore(
        self, folder: Path, version: int
    ) -> tuple[Weights, pa.RecordBatch, list[RolloutMeta]]:
        return self._worker.restore(folder, version)


class Rollouts:
    """The driver's end of a rollout actor; see `engine.loop.Rollouts`."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.actor = actor

    async def advance(
        self, prompts: pa.RecordBatch | None, weights: Any
    ) -> tuple[Any, RolloutReport]:
        batch, report = self.actor.advance.remote(prompts, weights)
        return batch, await report

    async def rehearse(self, weights: Any) -> None:
        """Sees that the worker samples as the learner does, before the run."""
        await self.actor.rehearse.remote(weights)

    async def generate(self, prompts: pa.RecordBatch, weights: Any) -> tuple[Any, RolloutReport]:
        batch, report = self.actor.generate.remote(prompts, weights)
        return batch, await report


class Teacher:
    """The driver's end of a teacher actor; see `engine.loop.Teacher`."""

    def __init__(self, name: str, actor: Any, cache: Cache) -> None:
        self.name = name
        self.actor = actor
        self._cache = cache

    async def score(
        self, batches: Sequence[Any], cache: Cache | None = None, rows: list[int] | None = None
    ) -> tuple[Any, ScoreReport]:
        batch, report = self.actor.score.remote(cache or self._cache, rows, *batches)
        return batch, await report

    async def answer(self, prompts: pa.RecordBatch) -> tuple[Any, RolloutReport]:
        batch, report = self.actor.answer.remote(prompts)
        return batch, await report


class Learner:
    """The driver's end of the learner actor; see `engine.loop.Learner`."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    async def load(self, rows: list[tuple[Any, list[int]]], version: int) -> None:
        batches, indices = _columns(rows)
        await self.actor.load.remote(indices, version, *batches)

    async def step(self) -> StepReport:
        report: StepReport = await self.actor.step.remote()
        return report

    async def published(self) -> tuple[Any, PublishReport]:
        weights, report = self.actor.published.remote()
        return weights, await report

    async def divergence(self, rows: list[tuple[Any, list[int]]]) -> np.ndarray:
        batches, indices = _columns(rows)
        totals: np.ndarray = await self.actor.divergence.remote(indices, *batches)
        return totals

    async def save(self, folder: Path, rows: list[tuple[Any, list[int]]]) -> None:
        batches, indices = _columns(rows)
        await self.actor.save.remote(folder, indices, *batches)

    async def restore(self, folder: Path, version: int) -> tuple[Any, Any, list[RolloutMeta]]:
        weights, batch, metas = self.actor.restore.remote(folder, version)
        return weights, batch, await metas


class Cluster:
    """The Ray session of a run and its actors."""

    def __init__(self, config: RunConfig, inputs: Inputs, all_cores: bool = False) -> None:
        self._config = config
        self._all_cores = all_cores
        self._inputs = inputs
        self._owned = False
        self.rollouts: list[Rollouts] = []
        self.teachers: list[Teacher] = []
        self.learner: Learner

    async def start(self) -> None:
        """Starts Ray, or joins it, and brings up all workers at the same time."""
        with _signal_handlers_kept():
            self._connect()
        await self._create()

    async def restart(self) -> None:
        """Replaces all workers by new ones, with nothing in flight."""
        self._kill()
        await self._create()

    async def weights(self) -> Any:
        """Reference to the learner's current weights."""
        weights, _ = await self.learner.published()
        return weights

    async def value(self, reference: Any) -> Any:
        """What a reference stands for; for the few small batches that leave the cluster."""
        return await reference

    def close(self) -> None:
        """Stops the workers, and Ray if this run started it."""
        self._kill()
        if self._owned:
            ray.shutdown()

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
        if self._config.ray_address:
            ray.init(address=self._config.ray_address, **options)
        else:
            count = self._config.rollout.workers + self._config.scoring.workers + 1
            ray.init(
                address="local",
                num_cpus=max(count, os.cpu_count() or 1),
                include_dashboard=False,
                **options,
            )
        self._owned = True

    async def _create(self) -> None:
        config, inputs = self._config, self._inputs
        rollout_cores, training_cores = _cores(config.rollout.workers, self._all_cores)
        gpus = _gpu_share(config)
        max_length = inputs.longest_prompt + config.rollout.max_new_tokens
        self.rollouts = []
        for index, cores in enumerate(rollout_cores):
            environment = vllm_environment([] if gpus else cores, config.rollout.memory_gib)
            actor = _actor(RolloutActor, len(cores), gpus, environment).remote(
                config, inputs.student, cores, index, max_length
            )
            self.rollouts.append(Rollouts(f"rollout-{index}", actor))
        teacher = _actor(TeacherActor, len(training_cores), gpus, {})
        self.teachers = [
            Teacher(
                f"teacher-{index}",
                teacher.remote(config, inputs.teacher, training_cores),
                config.estimator.cache,
            )
            for index in range(config.scoring.workers)
        ]
        groups = {"load": 1, "publish": 1}
        learner = _actor(LearnerActor, len(training_cores), gpus, {}, groups)
        self.learner = Learner(learner.remote(config, inputs.student, training_cores))
        await asyncio.gather(*(_ready(name, actor) for name, actor in self._actors()))
        if isinstance(config.estimator.cache, TeacherHidden):
            head = self.teachers[0].actor.head.remote()
            await self.learner.actor.imitate.remote(inputs.teacher, head)
        weights = await self.weights()
        await asyncio.gather(*(worker.rehearse(weights) for worker in self.rollouts))

    def _actors(self) -> list[tuple[str, Any]]:
        rollouts = [(worker.name, worker.actor) for worker in self.rollouts]
        teachers = [(worker.name, worker.actor) for worker in self.teachers]
        return [*rollouts, *teachers, ("learner", self.learner.actor)]

    def _kill(self) -> None:
        if not self.rollouts or not ray.is_initialized():
            return
        for _, actor in self._actors():
            ray.kill(actor)


def _actor(
    kind: type,
    threads: int,
    gpus: float,
    environment: dict[str, str],
    groups: dict[str, int] | None = None,
) -> Any:
    """An actor's class; each of its concurrency groups has its own threads."""
    # One thread for each core: OpenMP reads this before the process runs our code.
    variables = environment | {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    options = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0, "concurrency_groups": groups}
    remote = ray.remote(**options)(kind)
    return remote.options(runtime_env={"env_vars": variables})


async def _ready(name: str, actor: Any) -> None:
    try:
        await asyncio.wait_for(actor.ready.remote(), START_SECONDS)
    except TimeoutError:
        raise WorkerStartError(
            f"{name} was not ready after {START_SECONDS:.0f} s; does the cluster have the "
            "CPUs and GPUs for all workers?"
        ) from None
    except ray.exceptions.RayActorError as error:
        raise WorkerStartError(f"{name} didn't start: {error}") from error


def _columns(rows: list[tuple[Any, list[int]]]) -> tuple[list[Any], list[list[int]]]:
    return [batch for batch, _ in rows], [indices for _, indices in rows]


def _cores(workers: int, shared: bool = False) -> tuple[list[list[int]], list[int]]:
    """Cores of each rollout worker, and those that teacher and learner share. Half of the machine
    generates; a core belongs to both only where there are too few, or if all are shared."""
    cores = sorted(os.sched_getaffinity(0))
    if shared:
        return [cores] * workers, cores
    half = max(1, len(cores) // 2)
    generating = cores[:half]
    shares = [generating[i::workers] or [generating[i % half]] for i in range(workers)]
    return shares, cores[half:] or cores


def _pin(cores: list[int]) -> None:
    """Keeps this process on its cores: threads that share one wait for each other."""
    if set(cores) <= os.sched_getaffinity(0):  # not so on another machine of a cluster
        for thread in Path("/proc/self/task").iterdir():  # of concurrency groups too
            os.sched_setaffinity(int(thread.name), cores)


def _gpu_share(config: RunConfig) -> float:
    """GPUs for each worker: one each, or equal shares where there are fewer."""
    gpus = ray.cluster_resources().get("GPU", 0.0)
    workers = config.rollout.workers + config.scoring.workers + 1
    return min(1.0, float(int(100 * gpus / workers)) / 100)


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Ray replaces the handler of SIGTERM, without which a run couldn't end in good order."""
    saved = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in saved.items():
        signal.signal(number, handler)
