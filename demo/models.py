"""The demo's teacher, student and baseline, made here as ordinary Hugging Face folders.

    process 1   teacher    fresh solved problems without end
    process 2   student    600 solved problems: a cold start that is right about once in five
                baseline   the student, on the same 600 problems, for as many more updates as a
                           distillation makes: what solved examples alone can still give

One process and one thread each: matrices this small do not scale over threads, so two trainings
side by side are what fills two cores.

Everything is cached. An artefact's name ends in a digest of its recipe and of the library versions.
It is written next to its final name and then renamed, so a killed build leaves nothing that could
be taken for whole.
"""

import hashlib
import json
import math
import multiprocessing
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice, repeat
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

import tokenizers
import torch
import transformers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

from demo import ledger
from engine.optimizer import Muon

HEAD_DIM = 32
"""vLLM's CPU attention takes heads of 32 or 64 on machines without AVX-512."""

REVISION = 1
"""Part of every name: raise it when the code, rather than a recipe, changes what is made."""

POSITIONS = 1_024
"""The longest prompt and response together are below 500 tokens."""

POOL = 512
"""Examples sorted by length at once: about 30 batches, so that little of a batch is padding."""

WARMUP = 20
"""Steps in which the learning rates rise to their full value."""

Example = tuple[list[int], list[int]]
"""Prompt ids and response ids."""

Progress = Callable[[str, float], None]
"""Called with what is being made and the fraction done."""


@dataclass(frozen=True)
class Shape:
    """The size of a Qwen3 model."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    layers: int
    init_std: float


@dataclass(frozen=True)
class SparseShape(Shape):
    """The size of a Qwen3 mixture of experts; `ffn` is that of one expert."""

    experts: int
    active: int
    """Experts that a token goes through."""


@dataclass(frozen=True)
class Lessons:
    """One supervised training."""

    examples: int | None
    """Solved problems to go through again and again; None for fresh ones without end."""
    long_share: float
    """Share of problems whose length is uniform, see `ledger.stream`."""
    steps: int
    tokens: int
    """Most tokens of a batch, padding included."""
    muon_rate: float
    """Highest learning rate of the matrices; for all, a cosine goes down to 2 % of the highest."""
    adamw_rate: float
    """Highest learning rate of embeddings and norms."""
    decay: float
    """Share of the matrices that a step at learning rate 1 would take away. At 0 they grow, later
    updates count for less, and a model stays weak at finding amounts far back in long problems."""


@dataclass(frozen=True)
class Recipe:
    """All that is made, and how."""

    teacher: Shape = Shape(hidden=128, heads=4, kv_heads=2, ffn=384, layers=2, init_std=0.08)
    teacher_lessons: Lessons = Lessons(
        examples=None,
        long_share=0.1,
        steps=800,
        tokens=1_536,
        muon_rate=0.02,
        adamw_rate=3e-3,
        decay=0.5,
    )
    student: Shape = Shape(hidden=72, heads=3, kv_heads=1, ffn=216, layers=2, init_std=0.1)
    student_lessons: Lessons = Lessons(
        examples=600,
        long_share=0.0,
        steps=550,
        tokens=1_536,
        muon_rate=0.02,
        adamw_rate=4e-3,
        decay=0.0,
    )
    baseline_lessons: Lessons = Lessons(
        examples=600,
        long_share=0.0,
        steps=1_600,
        tokens=768,
        muon_rate=0.01,
        adamw_rate=1.5e-3,
        decay=0.0,
    )
    prompts: int = 8_400
    """Problems to distil on."""
    seed: int = 0
    """Changes the initial weights and every training stream, never the held-out problems."""


@dataclass(frozen=True)
class DemoFiles:
    """Where the demo's models and prompts are."""

    teacher: Path
    student: Path
    baseline: Path
    prompts: Path
    evaluation: Path


Plan = Callable[[DemoFiles, Recipe, Progress], None]
"""What one process makes."""


def prepare(directory: Path, progress: Progress, recipe: Recipe = Recipe()) -> DemoFiles:
    """Make whatever is missing under `directory`, and say where everything is."""
    directory.mkdir(parents=True, exist_ok=True)
    files = _files(directory, recipe)
    _write_whole(files.prompts, lambda path: _write_training_prompts(path, recipe))
    _write_whole(
        files.evaluation,
        lambda path: ledger.write_prompts(path, ledger.held_out(), prefix="held-out"),
    )
    plans: list[Plan] = []
    if not files.teacher.exists():
        plans.append(_make_teacher)
    if not (files.student.exists() and files.baseline.exists()):
        plans.append(_make_student_and_baseline)
    _run_side_by_side(plans, files, recipe, progress)
    return files


def _files(directory: Path, recipe: Recipe) -> DemoFiles:
    student = (recipe.student, recipe.student_lessons, recipe.seed)
    return DemoFiles(
        teacher=directory / _name("teacher", recipe.teacher, recipe.teacher_lessons, recipe.seed),
        student=directory / _name("student", *student),
        baseline=directory / _name("baseline", *student, recipe.baseline_lessons),
        prompts=directory / (_name("prompts", recipe.prompts, recipe.seed) + ".jsonl"),
        evaluation=directory / (_name("evaluation", ledger.HELD_OUT) + ".jsonl"),
    )


def _name(kind: str, *parts: Shape | Lessons | int) -> str:
    """`kind` and a digest of what it is made from."""
    versions = [module.__version__ for module in (torch, transformers, tokenizers)]
    plain = [part if isinstance(part, int) else asdict(part) for part in parts]
    digest = hashlib.sha256(json.dumps([REVISION, plain, versions]).encode()).hexdigest()
    return f"{kind}-{digest[:12]}"


def _write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` make a file or folder that appears under its name only when it is complete."""
    if path.exists():
        return
    workshop = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=path.parent))
    try:
        write(workshop / path.name)
        if not path.exists():  # another process may have been quicker
            (workshop / path.name).rename(path)
    finally:
        shutil.rmtree(workshop)


def _write_training_prompts(path: Path, recipe: Recipe) -> None:
    problems = ledger.stream(f"distillation {recipe.seed}")
    ledger.write_prompts(path, islice(problems, recipe.prompts), prefix="ledger")


def _run_side_by_side(
    plans: list[Plan], files: DemoFiles, recipe: Recipe, progress: Progress
) -> None:
    """Run each plan in a process of its own and pass on what it reports, until all are done."""
    context = multiprocessing.get_context("spawn")
    workers: dict[Connection, SpawnProcess] = {}
    for plan in plans:
        reports, outlet = context.Pipe(duplex=False)
        worker = context.Process(target=_work, args=(plan, files, recipe, outlet), daemon=True)
        worker.start()
        outlet.close()  # the worker holds the only other copy: the pipe ends when it does
        workers[reports] = worker
    try:
        while workers:
            ready = wait(list(workers))
            for reports in [each for each in workers if each in ready]:
                try:
                    progress(*reports.recv())
                except EOFError:
                    worker = workers.pop(reports)
                    worker.join()
                    if worker.exitcode:
                        raise RuntimeError(
                            f"making the demo's models ended with exit code {worker.exitcode}; "
                            "its traceback is above, and what was finished is kept for a retry"
                        ) from None
    finally:
        for worker in workers.values():
            worker.terminate()


def _work(plan: Plan, files: DemoFiles, recipe: Recipe, outlet: Connection) -> None:
    torch.set_num_threads(1)
    plan(files, recipe, lambda label, fraction: outlet.send((label, fraction)))


def _make_teacher(files: DemoFiles, recipe: Recipe, progress: Progress) -> None:
    tokenizer = ledger.make_tokenizer()
    model = _new_model(recipe.teacher, tokenizer, recipe.seed)
    name = f"teacher {recipe.seed}"
    _train(model, tokenizer, recipe.teacher_lessons, name, lambda done: progress("teacher", done))
    _write_whole(files.teacher, lambda path: _save(path, model, tokenizer))


def _make_student_and_baseline(files: DemoFiles, recipe: Recipe, progress: Progress) -> None:
    tokenizer = ledger.make_tokenizer()
    name = f"student {recipe.seed}"
    if files.student.exists():
        model = AutoModelForCausalLM.from_pretrained(files.student)
    else:
        model = _new_model(recipe.student, tokenizer, recipe.seed)
        lessons = recipe.student_lessons
        _train(model, tokenizer, lessons, name, lambda done: progress("student", done))
        _write_whole(files.student, lambda path: _save(path, model, tokenizer))
    lessons = recipe.baseline_lessons
    _train(model, tokenizer, lessons, name, lambda done: progress("baseline", done))
    _write_whole(files.baseline, lambda path: _save(path, model, tokenizer))


def _new_model(shape: Shape, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "tie_word_embeddings": True,
        "initializer_range": shape.init_std,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    config = Qwen3Config(**sizes)
    if isinstance(shape, SparseShape):
        config = Qwen3MoeConfig(
            **sizes,
            num_experts=shape.experts,
            num_experts_per_tok=shape.active,
            moe_intermediate_size=shape.ffn,
            norm_topk_prob=True,
        )
    return AutoModelForCausalLM.from_config(config)


def _save(path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,  # written out, because transformers would otherwise keep 50 tokens
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def _train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    lessons: Lessons,
    name: str,
    progress: Callable[[float], None],
) -> None:
    """Supervised fine-tuning on the responses, every token of a batch weighing the same."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim >= 2]
    others = [weight for weight in model.parameters() if weight.ndim == 1]
    others.append(model.model.embed_tokens.weight)
    optimizers = [
        Muon(matrices, lessons.muon_rate, lessons.decay),
        torch.optim.AdamW(others, lessons.adamw_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, lessons))
        for optimizer in optimizers
    ]
    model.train()
    for step, batch in enumerate(islice(_batches(tokenizer, lessons, name), lessons.steps)):
        _loss(model, batch, tokenizer.pad_token_id).backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        progress((step + 1) / lessons.steps)


def _rate(step: int, lessons: Lessons) -> float:
    """The share of the full learning rate: a linear rise, then a cosine from 1 to 0.02."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    done = (step - WARMUP) / max(1, lessons.steps - WARMUP)
    return 0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2


def _batches(
    tokenizer: PreTrainedTokenizerFast, lessons: Lessons, name: str
) -> Iterator[list[Example]]:
    """Batches of about one length each, in random order, without end."""
    rng = random.Random(name)
    for pool in _pools(tokenizer, lessons, name):
        batches = _split_by_length(rng.sample(pool, len(pool)), lessons.tokens)
        yield from rng.sample(batches, len(batches))


def _pools(
    tokenizer: PreTrainedTokenizerFast, lessons: Lessons, name: str
) -> Iterator[list[Example]]:
    """The fixed examples over and over, or fresh ones."""
    problems = ledger.stream(name, lessons.long_share)
    if lessons.examples is not None:
        yield from repeat(ledger.encode(tokenizer, list(islice(problems, lessons.examples))))
    while True:
        yield ledger.encode(tokenizer, list(islice(problems, POOL)))


def _split_by_length(examples: list[Example], tokens: int) -> list[list[Example]]:
    """Examples in batches of at most `tokens`, padding included, the shortest first."""
    batches: list[list[Example]] = [[]]
    for example in sorted(examples, key=_length):
        if batches[-1] and _length(example) * (len(batches[-1]) + 1) > tokens:
            batches.append([])
        batches[-1].append(example)
    return batches


def _length(example: Example) -> int:
    prompt, response = example
    return len(prompt) + len(response)


def _loss(model: PreTrainedModel, batch: list[Example], pad: int) -> Tensor:
    """Cross-entropy in nats, averaged over the response tokens.

    Padding is on the right, after all that is learnt from, so causal attention needs no mask.
    """
    width = max(_length(example) for example in batch)
    ids = torch.full((len(batch), width), pad)
    learnt = torch.zeros(len(batch), width, dtype=torch.bool)
    for row, (prompt, response) in enumerate(batch):
        end = len(prompt) + len(response)
        ids[row, :end] = torch.tensor(prompt + response)
        learnt[row, len(prompt) : end] = True
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[learnt[:, 1:]])
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:][learnt[:, 1:]])
