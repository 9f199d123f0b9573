"""The teacher's worker: ROLLOUT → SCORED.

It scores ids that the sampler chose, or its own top k, or the whole vocabulary; in chunks of
positions, so that its logits never exist for a whole batch.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from engine.batch import Ragged, sequences, split
from engine.config import Cache, Dense, Sampled, TeacherHidden, chosen_by_teacher
from engine.head import positions_per_chunk
from engine.models import Language
from engine.rollout import RolloutReport, RolloutWorker
from engine.schema import SCORED, RolloutMeta, describe, extend, nest, ragged, row_lengths, states
from engine.support import choose
from engine.weights import Weights


@dataclass(frozen=True)
class ScoreReport:
    """What the driver learns from scoring."""

    metas: list[RolloutMeta]
    tokens: int
    busy_seconds: float
    cpu_seconds: float
    """Of the worker's process, since it began."""
    nbytes: int
    """Of the batch."""


@dataclass(frozen=True)
class _Entries:
    """What is cached of consecutive tokens, flat."""

    counts: np.ndarray
    """Entries of each token."""
    scores: np.ndarray
    """log q of each entry."""
    ids: np.ndarray
    """Of each entry, where the teacher chose; else empty."""
    draws: np.ndarray
    """As `engine.support.Support.draws`, where the teacher drew; else empty."""
    hidden: np.ndarray
    """[tokens, D] float16: last hidden states; D is 0 where scores are cached."""

    @classmethod
    def join(cls, parts: "Sequence[_Entries]") -> "_Entries":
        return cls(*(np.concatenate(column) for column in zip(*map(_columns, parts), strict=True)))

    def split(self, tokens: np.ndarray) -> "list[_Entries]":
        """Cut into rows of so many tokens."""
        ends = np.cumsum(tokens)[:-1]
        entry_ends = np.concatenate([[0], np.cumsum(self.counts)])[ends]
        columns = [np.split(self.counts, ends)]
        for column in (self.scores, self.ids, self.draws):  # an empty column is cut into empty ones
            columns.append(np.split(column, entry_ends if len(column) else 0 * entry_ends))
        columns.append(np.split(self.hidden, ends))
        return [_Entries(*row) for row in zip(*columns, strict=True)]


def _columns(entries: _Entries) -> tuple[np.ndarray, ...]:
    return entries.counts, entries.scores, entries.ids, entries.draws, entries.hidden


class TeacherWorker:
    """Scores responses with a frozen language model."""

    def __init__(
        self, teacher: Language, temperature: float, token_budget: int, seed: int = 0
    ) -> None:
        self._teacher = teacher
        self._teacher.model.requires_grad_(False).eval()
        self._temperature = temperature
        self._token_budget = token_budget
        self._generator = torch.Generator(teacher.device).manual_seed(seed)

    def score(
        self, batches: list[pa.RecordBatch], cache: Cache, rows: list[int] | None = None
    ) -> tuple[pa.RecordBatch, ScoreReport]:
        """The rows of all batches, or these of them, as one SCORED batch, in order."""
        start = time.perf_counter()
        batch = pa.concat_batches(batches)
        if rows is not None:
            batch = batch.take(pa.array(rows, pa.int32()))
        lengths = row_lengths(batch, "prompt_ids") + row_lengths(batch, "response_ids")
        parts: dict[int, _Entries] = {}
        for part in split(lengths, np.arange(len(lengths)), self._token_budget):
            parts.update(zip(part.tolist(), self._score(batch, part, cache), strict=True))
        scored = _scored(batch, [parts[row] for row in range(len(lengths))], self._teacher.digest)
        report = ScoreReport(
            metas=describe(scored),
            tokens=int(lengths.sum()),
            busy_seconds=time.perf_counter() - start,
            cpu_seconds=time.process_time(),
            nbytes=scored.nbytes,
        )
        return scored, report

    def head(self) -> Weights:
        """For the learner, where it makes scores of hidden states."""
        return self._teacher.head_weights()

    def answer(
        self, prompts: pa.RecordBatch, max_new_tokens: int, slots: int, seed: int
    ) -> tuple[pa.RecordBatch, RolloutReport]:
        """The teacher's own responses, as a ROLLOUT batch, each token with its log q."""
        worker = RolloutWorker(
            self._teacher.sampler(self._temperature, slots),
            self._teacher.decode,
            Sampled(),
            max_new_tokens,
            seed,
        )
        return worker.generate(prompts)

    @torch.inference_mode()
    def _score(self, batch: pa.RecordBatch, rows: np.ndarray, cache: Cache) -> list[_Entries]:
        """The entries of each row."""
        tokens = Ragged.of(batch["response_ids"]).lengths[rows]
        hidden = self._teacher.hidden(sequences(batch, rows).to(self._teacher.device))
        if isinstance(cache, TeacherHidden):
            return _unscored(hidden).split(tokens)
        asked = _asked(batch, rows)
        chunk = positions_per_chunk(self._teacher.vocabulary)
        parts = []
        for first in range(0, max(len(hidden), 1), chunk):
            logprobs = self._teacher.logprobs(hidden[first : first + chunk], self._temperature)
            part = asked.take(np.arange(first, first + len(logprobs)))
            parts.append(self._entries(logprobs, part, cache))
        return _Entries.join(parts).split(tokens)

    def _entries(self, logprobs: Tensor, asked: Ragged, cache: Cache) -> _Entries:
        """Of [n, V] log q: of all ids, those the teacher chooses, or those asked for."""
        ids, draws = np.zeros(0, np.int32), np.zeros(0, np.uint16)
        if isinstance(cache, Dense):
            counts = np.full(len(logprobs), logprobs.shape[1])
            scores = logprobs.reshape(-1)
        elif chosen_by_teacher(cache):
            kept = choose(cache, logprobs, None, self._generator)
            counts, scores = kept.counts.cpu().numpy(), kept.logprobs
            ids = kept.ids.cpu().numpy().astype(np.int32)
            draws = kept.draws.cpu().numpy().astype(np.uint16)
        else:
            counts = asked.lengths
            owner = torch.from_numpy(np.repeat(np.arange(len(logprobs)), counts))
            wanted = torch.from_numpy(asked.values.astype(np.int64))
            scores = logprobs[owner.to(logprobs.device), wanted.to(logprobs.device)]
        hidden = np.zeros((len(counts), 0), np.float16)
        return _Entries(counts, scores.float().cpu().numpy(), ids, draws, hidden)


def _unscored(hidden: Tensor) -> _Entries:
    """The hidden states themselves. float16 holds those of a bfloat16 model exactly, and has eight
    times its precision for others'."""
    kept = hidden.half()
    if not kept.isfinite().all():
        raise ValueError(
            f"the teacher's hidden states reach {hidden.abs().max().item():.3g}, beyond float16: "
            'set estimator.cache.type = "poisson"'
        )
    none, floats = np.zeros(0, np.int32), np.zeros(0, np.float32)
    counts = np.zeros(len(kept), np.int64)
    return _Entries(counts, floats, none, none.astype(np.uint16), kept.cpu().numpy())


def _asked(batch: pa.RecordBatch, rows: np.ndarray) -> Ragged:
    """The ids that the sampler chose at each response token of these rows."""
    tokens = Ragged.of(batch["response_ids"]).positions(rows)
    return Ragged.nested(batch["cache_ids"]).take(tokens)


def _scored(batch: pa.RecordBatch, parts: list[_Entries], teacher: str) -> pa.RecordBatch:
    tokens = row_lengths(batch, "response_ids")
    entries = _Entries.join(parts)
    none = np.zeros(len(entries.counts), np.int32)
    return extend(
        batch,
        SCORED,
        [
            nest(ragged(entries.ids, entries.counts if len(entries.ids) else none), tokens),
            nest(ragged(entries.scores, entries.counts), tokens),
            nest(ragged(entries.draws, entries.counts if len(entries.draws) else none), tokens),
            nest(states(entries.hidden), tokens),
            pa.array([teacher] * len(parts), pa.string()),
        ],
    )
