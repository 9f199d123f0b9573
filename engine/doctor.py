"""`opdflow doctor`: every check before a night, each with its fix, and none stopping the others.

What a run refuses before it starts (`engine.preflight`), one by one; then what it would only meet
under way: chat templates, memory, storage, rights; and, if asked, two steps with real workers.
"""

import asyncio
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from json import loads
from pathlib import Path
from typing import Any

import fsspec
import torch

from engine.config import ConfigError, RunConfig
from engine.models import load_tokenizer, pick_device, pick_dtype, resolve, stop_ids
from engine.preflight import (
    Inputs,
    check_address,
    find,
    k_fits,
    same_end,
    same_tokenizer,
)
from engine.run import Run

GIB = 2**30
# A worker's process beside its model: interpreter, torch, libraries.
PROCESS_GIB = 0.6
# Master weights, their gradients and AdamW's two moments, in float32.
LEARNER_BYTES = 4 * 4
# Weights and the optimizer's two moments, in float32.
CHECKPOINT_BYTES = 3 * 4
STEPS = 2


@dataclass(frozen=True)
class Finding:
    """What a check found."""

    name: str
    ok: bool
    text: str
    """What was found, or what is wrong and what to do."""


class Doctor:
    """The checks of one configuration."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def findings(self, steps: bool = False) -> Iterator[Finding]:
        """Every check, in order; a check that needs what an earlier one missed says so."""
        checks: dict[str, Callable[[], str]] = {
            "models": self._models,
            "tokenizer": self._tokenizer,
            "end of sequence": self._end,
            "chat template": self._template,
            "prompts and context": self._context,
            "estimator": self._estimator,
            "memory": self._memory,
            "storage": self._storage,
            "export": self._export,
            "MLflow": lambda: self._address("tracking.uri", self._mlflow),
            "Prefect": lambda: self._address("PREFECT_API_URL", os.environ.get("PREFECT_API_URL")),
        }
        if steps:
            checks["two steps"] = self._steps
        for name, look in checks.items():
            try:
                yield Finding(name, True, look())
            except ConfigError as error:
                yield Finding(name, False, str(error))

    @cached_property
    def _folders(self) -> tuple[Path, Path]:
        return resolve(self.config.student.model), resolve(self.config.teacher.model)

    @cached_property
    def _tokenizers(self) -> tuple[Any, Any]:
        student, teacher = self._folders
        config = self.config
        return (
            load_tokenizer(student, config.student.trust_remote_code),
            load_tokenizer(teacher, config.teacher.trust_remote_code),
        )

    @cached_property
    def _inputs(self) -> Inputs:
        return find(self.config)

    @property
    def _mlflow(self) -> str:
        return self.config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI", "")

    def _models(self) -> str:
        sizes = [parameters(folder) for folder in self._folders]
        return " and ".join(
            f"{who} of {count / 1e6:.2f} M parameters"
            for who, count in zip(("student", "teacher"), sizes, strict=True)
        )

    def _tokenizer(self) -> str:
        same_tokenizer(*self._tokenizers, self.config)
        return f"{len(self._tokenizers[0])} ids, the same for both"

    def _end(self) -> str:
        ids = [stop_ids(f, t) for f, t in zip(self._folders, self._tokenizers, strict=True)]
        same_end(ids[0], ids[1], self.config)
        return f"ids {ids[0]} end a response"

    def _template(self) -> str:
        ours, theirs = (tokenizer.chat_template for tokenizer in self._tokenizers)
        if not ours:
            raise ConfigError(
                f"{self.config.student.model} has no chat template, so rows with `messages` can't "
                "be used; copy chat_template.jinja from a model of the family, or give `text`"
            )
        if ours != theirs:
            raise ConfigError(
                "student and teacher have different chat templates: prompts are written by the "
                "student's, which the teacher may not know; copy the teacher's to the student"
            )
        return "the same for both"

    def _context(self) -> str:
        inputs, config = self._inputs, self.config  # finding them has checked their lengths
        longest = inputs.longest_prompt + config.rollout.max_new_tokens
        return (
            f"{len(inputs.prompts)} prompts, {len(inputs.evaluated)} held out; "
            f"at most {longest} tokens with the response"
        )

    def _estimator(self) -> str:
        k_fits(self.config, len(self._tokenizers[0]))
        estimator = self.config.estimator
        return f"{estimator.type} by {estimator.cache.type}"

    def _memory(self) -> str:
        plan = memory_plan(self.config, *map(parameters, self._folders))
        needed, there = sum(plan.values()), available_memory()
        text = ", ".join(f"{name} {size:.1f}" for name, size in plan.items())
        if needed > there:
            raise ConfigError(
                f"the workers need about {needed:.1f} GiB ({text}) and {there:.1f} GiB are there; "
                "lower rollout.memory_gib or the number of workers, or take smaller models"
            )
        return f"about {needed:.1f} of {there:.1f} GiB: {text}"

    def _storage(self) -> str:
        folder = Path(self.config.directory).absolute()
        _writable(str(folder), "directory")
        needed = (self.config.checkpoint.keep + 1) * CHECKPOINT_BYTES * parameters(self._folders[0])
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise ConfigError(
                f"{folder}: checkpoints need {needed / GIB:.1f} GiB and {free / GIB:.1f} GiB are "
                "free; lower checkpoint.keep, or set directory to a larger disk"
            )
        return f"{folder}: checkpoints of {needed / GIB:.2f} GiB, {free / GIB:.1f} GiB free"

    def _export(self) -> str:
        url = self.config.nightly.export
        if url:
            _writable(url, "nightly.export")
        return url or "in the directory"

    def _address(self, name: str, uri: str | None) -> str:
        check_address(name, uri or "")
        return "answers" if uri else "of its own, beside the runs"

    def _steps(self) -> str:
        """Two steps with real workers, and what they say of the whole run's time."""
        training = self.config.training
        short = training.model_copy(update={"steps": STEPS})
        with tempfile.TemporaryDirectory() as folder:
            config = self.config.model_copy(update={"training": short, "directory": folder})
            seconds = asyncio.run(_two_steps(Run(config, self._inputs, Path(folder) / "run")))
        hours = (seconds["start"] + seconds["step"] * training.steps) / 3600
        return (
            f"workers started in {seconds['start']:.0f} s, a step took {seconds['step']:.1f} s: "
            f"{training.steps} steps take about {hours:.2f} h, evaluations aside"
        )


async def _two_steps(run: Run) -> dict[str, float]:
    started = time.perf_counter()
    try:
        await run.start()
        ready = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            group.create_task(run.generate(STEPS))
            group.create_task(run.train(STEPS))
        return {"start": ready - started, "step": (time.perf_counter() - ready) / STEPS}
    finally:
        run.close()


def parameters(folder: Path) -> int:
    """Parameters of a model's folder, by the headers of its files."""
    return sum(_entries(path) for path in folder.glob("*.safetensors"))


def _entries(path: Path) -> int:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = loads(file.read(length))
    shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
    return sum(int(torch.Size(shape).numel()) for shape in shapes)


def memory_plan(config: RunConfig, student: int, teacher: int) -> dict[str, float]:
    """GiB by role, from the models' parameters; without activations."""
    device = pick_device()
    size = {
        name: pick_dtype(section.dtype, device).itemsize
        for name, section in (("student", config.student), ("teacher", config.teacher))
    }
    cache = config.rollout.memory_gib if config.rollout.backend == "vllm" else 0.0
    rollout = size["student"] * student / GIB + cache + PROCESS_GIB
    scoring = size["teacher"] * teacher / GIB + PROCESS_GIB
    return {
        "rollout": config.rollout.workers * rollout,
        "teacher": config.scoring.workers * scoring,
        "learner": LEARNER_BYTES * student / GIB + PROCESS_GIB,
    }


def available_memory() -> float:
    """GiB of all GPUs or, without one, of this machine that are there to be used."""
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        return sum(torch.cuda.mem_get_info(i)[0] for i in range(count)) / GIB
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return kib * 1024 / GIB


def _writable(url: str, key: str) -> None:
    """Refuses a folder at a URL in which nothing can be written."""
    try:
        files, folder = fsspec.core.url_to_fs(url)
        files.makedirs(folder, exist_ok=True)
        probe = f"{folder}/.opdflow-{os.getpid()}"
        files.pipe_file(probe, b"")
        files.rm(probe)
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(f"{key} {url}: can't be written: {error}") from None
