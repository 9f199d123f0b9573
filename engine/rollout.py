"""The student's worker: PROMPT → ROLLOUT, every token stamped with its policy version.

    advance(prompts, weights) ─ apply weights, if newer ─ add prompts ─ decode for a slice of time
                              └→ the responses that finished, as one ROLLOUT batch; others go on

A call is a slice: new weights and new prompts enter between two decoding steps, requests in flight
are neither restarted nor drained, and no second thread exists that could see a version change under
its hands.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from engine.backends import Decoded, Request, Sampler
from engine.config import Cache, Poisson, Sampled
from engine.estimators import draw_poisson
from engine.schema import (
    PROMPT,
    ROLLOUT,
    VERSION_RUNS,
    RolloutMeta,
    describe,
    extend,
    nest,
    ragged,
)
from engine.verifiers import VERIFIERS
from engine.weights import Weights

# Longer slices delay fresh weights and finished responses; shorter ones cost calls.
SLICE_SECONDS = 0.1


@dataclass(frozen=True)
class RolloutReport:
    """What the driver learns from a slice."""

    metas: list[RolloutMeta]
    version: int
    """Applied on the worker."""
    running: int
    sampled_tokens: int
    busy_seconds: float
    sync_seconds: float
    """Part of it spent on applying weights."""


@dataclass
class _Trace:
    """A response in the making."""

    row: dict[str, Any]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    runs: list[list[int]] = field(default_factory=list)
    cache_ids: list[np.ndarray] = field(default_factory=list)
    cache_logprobs: list[np.ndarray] = field(default_factory=list)
    finish_reason: str = ""


class RolloutWorker:
    """Generates with a sampler and records what the estimator needs."""

    def __init__(
        self,
        sampler: Sampler,
        decode: Callable[[Sequence[int]], str],
        cache: Cache,
        max_new_tokens: int,
        seed: int,
        version: int = 0,
    ) -> None:
        self.version = version
        self._sampler = sampler
        self._decode = decode
        self._cache = cache
        self._max_new_tokens = max_new_tokens
        self._seed = seed
        self._generator = torch.Generator().manual_seed(seed)
        self._traces: dict[int, _Trace] = {}

    def advance(
        self, prompts: pa.RecordBatch | None, weights: Weights | None = None
    ) -> tuple[pa.RecordBatch, RolloutReport]:
        """Decodes for a slice; returns the responses that finished in it."""
        start = time.perf_counter()
        sync = 0.0
        if weights is not None and weights.version != self.version:
            self._sampler.load(weights)
            self.version = weights.version
            sync = time.perf_counter() - start
        for row in prompts.to_pylist() if prompts is not None else ():
            self._start(row)
        sampled, finished = 0, []
        while self._sampler.running and time.perf_counter() - start < SLICE_SECONDS:
            decoded = self._sampler.step()
            sampled += len(decoded.tickets)
            finished += self._record(decoded)
        batch = self._finish(finished)
        busy = time.perf_counter() - start
        report = RolloutReport(
            describe(batch), self.version, self._sampler.running, sampled, busy, sync
        )
        return batch, report

    def generate(
        self, prompts: pa.RecordBatch, weights: Weights | None = None
    ) -> tuple[pa.RecordBatch, RolloutReport]:
        """Responses to all prompts, for evaluation: advances until each has finished."""
        if self._sampler.running:
            raise RuntimeError("the worker has responses in flight: generate() must own it")
        batches, reports = [], []
        batch, report = self.advance(prompts, weights)
        batches, reports = [batch], [report]
        while report.running:
            batch, report = self.advance(None)
            batches.append(batch)
            reports.append(report)
        merged = pa.concat_batches(batches)
        total = RolloutReport(
            describe(merged),
            self.version,
            0,
            sum(r.sampled_tokens for r in reports),
            sum(r.busy_seconds for r in reports),
            sum(r.sync_seconds for r in reports),
        )
        return merged, total

    def _start(self, row: dict[str, Any]) -> None:
        ticket = row["ticket"]
        seed = np.random.SeedSequence([self._seed, ticket + 2**32, row["attempt"]])
        self._traces[ticket] = _Trace(row)
        self._sampler.add(
            Request(ticket, row["prompt_ids"], self._max_new_tokens, int(seed.generate_state(1)[0]))
        )

    def _record(self, decoded: Decoded) -> list[_Trace]:
        """Appends a decoding step to the traces; returns those that it finished."""
        emitted = decoded.logprobs.gather(1, decoded.token_ids[:, None].to(decoded.logprobs.device))
        counts, cache_ids, cache_logprobs = self._kept(decoded, emitted)
        ends = np.cumsum(counts)
        columns = zip(
            decoded.tickets,
            decoded.token_ids.tolist(),
            emitted[:, 0].tolist(),
            ends - counts,
            ends,
            strict=True,
        )
        for ticket, token, logprob, first, last in columns:
            trace = self._traces[ticket]
            trace.ids.append(token)
            trace.logprobs.append(logprob)
            if trace.runs and trace.runs[-1][0] == self.version:
                trace.runs[-1][1] += 1
            else:
                trace.runs.append([self.version, 1])
            trace.cache_ids.append(cache_ids[first:last])
            trace.cache_logprobs.append(cache_logprobs[first:last])
        finished = []
        for ticket, reason in decoded.finished.items():
            trace = self._traces.pop(ticket)
            trace.finish_reason = reason
            finished.append(trace)
        return finished

    def _kept(self, decoded: Decoded, emitted: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Cached ids of a decoding step: how many for each response, the ids, their log p_old."""
        match self._cache:
            case Sampled():
                counts = torch.ones(len(decoded.tickets), dtype=torch.long)
                ids, logprobs = decoded.token_ids, emitted[:, 0]
            case Poisson(n=n, alpha=alpha):
                counts, ids, logprobs = draw_poisson(decoded.logprobs, n, alpha, self._generator)
            case _:  # the teacher chooses, or takes all
                counts = torch.zeros(len(decoded.tickets), dtype=torch.long)
                ids, logprobs = torch.zeros(0, dtype=torch.long), torch.zeros(0)
        return counts.cpu().numpy(), ids.int().cpu().numpy(), logprobs.cpu().numpy()

    def _finish(self, traces: list[_Trace]) -> pa.RecordBatch:
        """A ROLLOUT batch of finished responses."""
        prompts = pa.RecordBatch.from_pylist([trace.row for trace in traces], PROMPT)
        lengths = [len(trace.ids) for trace in traces]
        kept = [len(ids) for trace in traces for ids in trace.cache_ids]
        ids = _flat([ids for trace in traces for ids in trace.cache_ids], np.int32)
        logprobs = _flat([lp for trace in traces for lp in trace.cache_logprobs], np.float32)
        runs = [[{"version": v, "length": n} for v, n in trace.runs] for trace in traces]
        return extend(
            prompts,
            ROLLOUT,
            [
                ragged(np.array([i for t in traces for i in t.ids], np.int32), lengths),
                ragged(np.array([lp for t in traces for lp in t.logprobs], np.float32), lengths),
                pa.array(runs, VERSION_RUNS),
                pa.array([trace.finish_reason for trace in traces], pa.string()),
                pa.array([self._verify(trace) for trace in traces], pa.bool_()),
                nest(ragged(ids, kept), lengths),
                nest(ragged(logprobs, kept), lengths),
            ],
        )

    def _verify(self, trace: _Trace) -> bool | None:
        answer = trace.row["answer"]
        if answer is None:
            return None
        return VERIFIERS[trace.row["verifier"]](self._decode(trace.ids), answer)


def _flat(parts: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
