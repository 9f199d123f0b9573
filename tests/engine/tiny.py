"""What the workers' tests share: configurations, prompts and rollouts of tiny models, and oracles.

The oracles are plain transformers: one sequence at a time, no padding, no cache, all logits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from transformers import DynamicCache

from engine.backends import Request, Sampler
from engine.config import Cache, RunConfig, chosen_by_teacher, parse
from engine.models import Language
from engine.schema import PROMPT, ROLLOUT, validate
from engine.support import choose

CPU = torch.device("cpu")


def language(folder: Path, dtype: torch.dtype = torch.float32) -> Language:
    return Language(folder, dtype, CPU)


def run_config(student: Path, teacher: Path, **sections: Any) -> RunConfig:
    """A run of these models; sections are as in its TOML file. Nothing reads the prompt files."""
    data: dict[str, Any] = {
        "student": {"model": str(student)},
        "teacher": {"model": str(teacher)},
        "prompts": {"path": "prompts.jsonl"},
        "evaluation": {"path": "evaluation.jsonl"},
        "training": {"steps": 10, "batch": 4},
        "rollout": {"backend": "hf"},
        "optimizer": {"lr": 1e-3, "warmup_steps": 0, "clip": 1e9},
    }
    for name, section in sections.items():
        merge = isinstance(section, dict) and "type" not in section
        data[name] = data.get(name, {}) | section if merge else section
    return parse(data, "test")


def random_ids(length: int, seed: int, vocabulary: int) -> list[int]:
    """Ids of ordinary tokens: the first four of a tiny tokenizer are special."""
    return np.random.default_rng(seed).integers(4, vocabulary, length).tolist()


def prompt_batch(
    prompts: Sequence[Sequence[int]],
    first_ticket: int = 0,
    answers: Sequence[str | None] | None = None,
    verifier: str = "exact",
    attempt: int = 0,
) -> pa.RecordBatch:
    rows = [
        {
            "ticket": first_ticket + index,
            "attempt": attempt,
            "prompt_id": f"prompt-{index}",
            "prompt_ids": list(ids),
            "answer": answers[index] if answers else None,
            "verifier": verifier,
        }
        for index, ids in enumerate(prompts)
    ]
    return validate(pa.RecordBatch.from_pylist(rows, PROMPT), PROMPT)


@torch.no_grad()
def logprobs_of(
    model: Any, prompt: Sequence[int], response: Sequence[int], vocabulary: int, temperature: float
) -> Tensor:
    """[T, V] the distributions of a response's tokens, by one fresh forward pass."""
    return next_logprobs(model, [*prompt, *response], vocabulary, temperature)[
        len(prompt) - 1 : len(prompt) + len(response) - 1
    ]


def next_logprobs(
    model: Any, ids: Sequence[int], vocabulary: int, temperature: float = 1.0
) -> Tensor:
    """[L, V] the distribution after each position, with a gradient where grad mode is on."""
    logits = model(input_ids=torch.tensor([list(ids)])).logits[0, :, :vocabulary]
    return (logits.float() / temperature).log_softmax(-1)


@torch.no_grad()
def logprobs_across_swap(
    old: Any,
    new: Any,
    prompt: Sequence[int],
    response: Sequence[int],
    swap: int,
    vocabulary: int,
    temperature: float,
) -> Tensor:
    """[T, V] of a response whose weights changed after `swap` tokens were emitted: what the old
    model has read stays in the cache as the old model's keys and values."""
    cache = DynamicCache()
    rows = []
    ids = [*prompt, *response]
    for step in range(len(response)):
        model = old if step < swap else new
        start = 0 if step == 0 else len(prompt) + step - 1
        fed = torch.tensor([ids[start : len(prompt) + step]])
        logits = model(input_ids=fed, past_key_values=cache, use_cache=True).logits[0, -1]
        rows.append((logits[:vocabulary].float() / temperature).log_softmax(-1))
    return torch.stack(rows)


def rollout_batch(
    sampler: Language,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    cache: Cache,
    temperature: float = 1.0,
    runs: Sequence[Sequence[tuple[int, int]]] | None = None,
    first_ticket: int = 0,
) -> pa.RecordBatch:
    """A ROLLOUT batch of given responses, with the log-probabilities that `sampler`'s model gives
    them. `runs` are (version, tokens) pairs of each row; all version 0 if not given."""
    generator = torch.Generator().manual_seed(0)
    rows = prompt_batch(prompts, first_ticket).to_pylist()
    for index, row in enumerate(rows):
        response = list(responses[index])
        logprobs = logprobs_of(
            sampler.model, prompts[index], response, sampler.vocabulary, temperature
        )
        emitted = logprobs[range(len(response)), response].tolist()
        kept = kept_logprobs = draws = [[] for _ in response]
        if not chosen_by_teacher(cache):
            chosen = choose(cache, logprobs, torch.tensor(response), generator)
            sizes = chosen.counts.tolist()
            kept = [part.tolist() for part in chosen.ids.split(sizes)]
            kept_logprobs = [part.tolist() for part in chosen.logprobs.split(sizes)]
            if len(chosen.draws):
                draws = [part.tolist() for part in chosen.draws.split(sizes)]
        spans = runs[index] if runs else [(0, len(response))]
        row |= {
            "response_ids": response,
            "sampler_logprobs": emitted,
            "version_runs": [{"version": v, "length": n} for v, n in spans],
            "finish_reason": "stop" if response[-1] in sampler.stop_ids else "length",
            "correct": None,
            "cache_ids": kept,
            "cache_logprobs": kept_logprobs,
            "cache_draws": draws,
        }
    return validate(pa.RecordBatch.from_pylist(rows, ROLLOUT), ROLLOUT)


def with_column(batch: pa.RecordBatch, name: str, values: list[Any]) -> pa.RecordBatch:
    """The same batch with one column's values exchanged."""
    index = batch.schema.get_field_index(name)
    return batch.set_column(
        index, batch.schema.field(name), pa.array(values, batch.schema.field(name).type)
    )


@dataclass
class Response:
    """What a sampler emitted for one request."""

    ids: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    reason: str = ""

    @property
    def logprobs(self) -> Tensor:
        """[T, V]."""
        return torch.stack(self.rows)


class Driven:
    """A sampler, its responses by ticket, and the tickets of each of its steps."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.requests: dict[int, Request] = {}
        self.responses: dict[int, Response] = {}
        self.steps: list[list[int]] = []

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.requests[request.ticket] = request
            self.responses[request.ticket] = Response()
            self.sampler.add(request)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            decoded = self.sampler.step()
            self.steps.append(decoded.tickets)
            ids = decoded.token_ids.tolist()
            for ticket, token, row in zip(decoded.tickets, ids, decoded.logprobs, strict=True):
                assert not self.responses[ticket].reason, "a finished response went on"
                self.responses[ticket].ids.append(token)
                self.responses[ticket].rows.append(row.clone())
            for ticket, reason in decoded.finished.items():
                self.responses[ticket].reason = reason

    def drain(self) -> dict[int, Response]:
        while self.sampler.running:
            self.step()
        return self.responses


def worst_difference(
    driven: Driven, oracle: Callable[[Request, Response], Tensor], tickets: Sequence[int] = ()
) -> float:
    """Greatest difference between recorded and true log-probabilities, over all ids and tokens."""
    chosen = tickets or list(driven.responses)
    return max(
        (driven.responses[t].logprobs - oracle(driven.requests[t], driven.responses[t]))
        .abs()
        .max()
        .item()
        for t in chosen
    )
