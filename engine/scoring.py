"""The teacher's worker: ROLLOUT → SCORED.

It scores ids that the sampler chose, or its own top k, or the whole vocabulary; in chunks of
positions, so that its logits never exist for a whole batch.
"""

import time
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from engine.batch import Ragged, sequences, split
from engine.config import Cache, Dense, Sampled, TeacherTopK
from engine.estimators import top_k_support
from engine.head import positions_per_chunk
from engine.models import Language
from engine.rollout import RolloutReport, RolloutWorker
from engine.schema import SCORED, RolloutMeta, describe, extend, nest, ragged, row_lengths


@dataclass(frozen=True)
class ScoreReport:
    """What the driver learns from scoring."""

    metas: list[RolloutMeta]
    tokens: int
    busy_seconds: float


class TeacherWorker:
    """Scores responses with a frozen language model."""

    def __init__(self, teacher: Language, temperature: float, token_budget: int) -> None:
        self._teacher = teacher
        self._teacher.model.requires_grad_(False).eval()
        self._temperature = temperature
        self._token_budget = token_budget

    def score(
        self, batches: list[pa.RecordBatch], cache: Cache, rows: list[int] | None = None
    ) -> tuple[pa.RecordBatch, ScoreReport]:
        """The rows of all batches, or these of them, as one SCORED batch, in order."""
        start = time.perf_counter()
        batch = pa.concat_batches(batches)
        if rows is not None:
            batch = batch.take(pa.array(rows, pa.int32()))
        lengths = row_lengths(batch, "prompt_ids") + row_lengths(batch, "response_ids")
        parts: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        for part in split(lengths, np.arange(len(lengths)), self._token_budget):
            parts.update(zip(part.tolist(), self._score(batch, part, cache), strict=True))
        scored = _scored(batch, [parts[row] for row in range(len(lengths))], self._teacher.digest)
        report = ScoreReport(describe(scored), int(lengths.sum()), time.perf_counter() - start)
        return scored, report

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
    def _score(
        self, batch: pa.RecordBatch, rows: np.ndarray, cache: Cache
    ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(entries of each token, ids the teacher chose, log q) of each row."""
        device = self._teacher.device
        tokens = Ragged.of(batch["response_ids"]).lengths[rows]
        hidden = self._teacher.hidden(sequences(batch, rows).to(device))
        asked = _asked(batch, rows)
        counts, ids, scores = [], [], []
        chunk = positions_per_chunk(self._teacher.vocabulary)
        for first in range(0, len(hidden), chunk):
            logprobs = self._teacher.logprobs(hidden[first : first + chunk], self._temperature)
            last = first + len(logprobs)
            part = asked.take(np.arange(first, last))
            count, chosen, score = _entries(logprobs, part, cache)
            counts.append(count)
            ids.append(chosen)
            scores.append(score.float().cpu().numpy())
        return _by_row(tokens, np.concatenate(counts), ids, scores)


def _asked(batch: pa.RecordBatch, rows: np.ndarray) -> Ragged:
    """The ids that the sampler chose at each response token of these rows."""
    tokens = Ragged.of(batch["response_ids"]).positions(rows)
    return Ragged.nested(batch["cache_ids"]).take(tokens)


def _entries(
    logprobs: Tensor, asked: Ragged, cache: Cache
) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """For n tokens: entries of each, ids the teacher chose, log q at all entries."""
    nothing = np.zeros(0, np.int32)
    match cache:
        case Dense():
            counts = np.full(len(logprobs), logprobs.shape[1])
            return counts, nothing, logprobs.reshape(-1)
        case TeacherTopK(k=k):
            kept, ids, scores = top_k_support(logprobs, k)
            return kept.cpu().numpy(), ids.int().cpu().numpy(), scores
        case _:
            owner = torch.from_numpy(np.repeat(np.arange(len(logprobs)), asked.lengths))
            ids = torch.from_numpy(asked.values.astype(np.int64))
            scores = logprobs[owner.to(logprobs.device), ids.to(logprobs.device)]
            return asked.lengths, nothing, scores


def _by_row(
    tokens: np.ndarray, counts: np.ndarray, ids: list[np.ndarray], scores: list[np.ndarray]
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Cuts flat entries into rows of `tokens` tokens each."""
    ends = np.cumsum(tokens)
    entry_ends = np.concatenate([[0], np.cumsum(counts)])[ends]
    chosen = np.concatenate(ids)
    cut_ids = np.split(chosen, entry_ends[:-1]) if len(chosen) else [chosen] * len(tokens)
    cut_scores = np.split(np.concatenate(scores), entry_ends[:-1])
    return list(zip(np.split(counts, ends[:-1]), cut_ids, cut_scores, strict=True))


def _scored(
    batch: pa.RecordBatch, parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]], teacher: str
) -> pa.RecordBatch:
    tokens = row_lengths(batch, "response_ids")
    counts = np.concatenate([count for count, _, _ in parts])
    ids = np.concatenate([chosen for _, chosen, _ in parts])
    scores = np.concatenate([score for _, _, score in parts])
    own = counts if len(ids) else np.zeros(len(counts), np.int32)
    return extend(
        batch,
        SCORED,
        [
            nest(ragged(ids, own), tokens),
            nest(ragged(scores, counts), tokens),
            pa.array([teacher] * len(parts), pa.string()),
        ],
    )
