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
from engine.canary import Canary
from engine.config import Cache, chosen_by_teacher
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
from engine.support import choose
from engine.verifiers import VERIFIERS
from engine.weights import Weights

# Longer slices delay fresh weights and finished responses; shorter ones cost calls.
SLICE_SECONDS = 0.1
# The canary's ticket; those of prompts are positive, of evaluations a little below 0.
CANARY = -(2**62)


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
    """Spent on applying weights, beside the busy ones."""
    cpu_seconds: float
    """Of the worker's process, since it began."""
    nbytes: int
    """Of the batch."""


@dataclass
class _Trace:
    """A response in the making."""

    row: dict[str, Any]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    runs: list[list[int]] = field(default_factory=list)
    cache_ids: list[np.ndarray] = field(default_factory=list)
    cache_logprobs: list[np.ndarray] = field(default_factory=list)
    cache_draws: list[np.ndarray] = field(default_factory=list)
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
        reprefill: bool = False,
    ) -> None:
        self.version = 0
        self._reprefill = reprefill
        self._sampler = sampler
        self._decode = decode
        self._cache = cache
        self._max_new_tokens = max_new_tokens
        self._seed = seed
        self._generator = torch.Generator().manual_seed(seed)
        self._traces: dict[int, _Trace] = {}
        self._canary: Canary | None = None  # to be compared before anything is given away

    def advance(
        self, prompts: pa.RecordBatch | None, weights: Weights | None = None
    ) -> tuple[pa.RecordBatch, RolloutReport]:
        """Decodes for a slice; returns the responses that finished in it."""
        start = time.perf_counter()
        sync = 0.0
        if weights is not None and weights.version != self.version:
            self._take(weights)
            sync = time.perf_counter() - start
        for row in prompts.to_pylist() if prompts is not None else ():
            self._start(row)
        sampled, finished = 0, []
        while self._canary or (
            self._sampler.running and time.perf_counter() - start < SLICE_SECONDS
        ):
            decoded = self._step()
            sampled += len(decoded.tickets)
            finished += self._record(decoded)
        batch = self._finish(finished)
        report = RolloutReport(
            metas=describe(batch),
            version=self.version,
            running=self._sampler.running,
            sampled_tokens=sampled,
            busy_seconds=time.perf_counter() - start - sync,
            sync_seconds=sync,
            cpu_seconds=time.process_time(),
            nbytes=batch.nbytes,
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
            metas=describe(merged),
            version=self.version,
            running=0,
            sampled_tokens=sum(r.sampled_tokens for r in reports),
            busy_seconds=sum(r.busy_seconds for r in reports),
            sync_seconds=sum(r.sync_seconds for r in reports),
            cpu_seconds=reports[-1].cpu_seconds,
            nbytes=merged.nbytes,
        )
        return merged, total

    def rehearse(self, weights: Weights) -> None:
        """Before a run: compares the sampler with the learner as it was loaded, and again after a
        swap to the weights given, which are the same. Raises WrongSamplerError or
        WeightsMismatchError."""
        self._release(weights.canary)
        while self._canary:
            self._step()
        self._take(weights)
        while self._canary:
            self._step()

    def _take(self, weights: Weights) -> None:
        """Loads weights, which are this worker's version from here on."""
        self._sampler.load(weights, self._reprefill)
        self.version = weights.version
        self._release(weights.canary)

    def _release(self, canary: Canary | None) -> None:
        """Has the sampler say what comes after the canary's prompt, with its next step."""
        if canary:
            self._sampler.add(Request(CANARY, canary.prompt_ids, 1, 0, greedy=True, urgent=True))
        self._canary = canary

    def _step(self) -> Decoded:
        """One decoding step, in which the canary is compared if it was part of it."""
        decoded = self._sampler.step()
        if self._canary and CANARY in decoded.tickets:
            logprobs, decoded = decoded.without(CANARY)
            self._canary.compare(logprobs, self.version)
            self._canary = None
        return decoded

    def _start(self, row: dict[str, Any]) -> None:
        ticket = row["ticket"]
        seed = np.random.SeedSequence([self._seed, ticket + 2**32, row["attempt"]])
        self._traces[ticket] = _Trace(row)
        self._sampler.add(
            Request(ticket, row["prompt_ids"], self._max_new_tokens, int(seed.generate_state(1)[0]))
        )

    def _record(self, decoded: Decoded) -> list[_Trace]:
        """Appends a decoding step to the traces; returns those that it finished."""
        tokens = decoded.token_ids.to(decoded.logprobs.device)
        emitted = decoded.logprobs.gather(1, tokens[:, None])
        counts, cache_ids, cache_logprobs, cache_draws = self._kept(decoded.logprobs, tokens)
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
            trace.cache_draws.append(cache_draws[first:last])  # an empty column stays empty
        finished = []
        for ticket, reason in decoded.finished.items():
            trace = self._traces.pop(ticket)
            trace.finish_reason = reason
            finished.append(trace)
        return finished

    def _kept(
        self, logprobs: Tensor, tokens: Tensor
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Cached ids of a decoding step: how many for each response, the ids, their log p_old, and
        how often each was drawn."""
        if chosen_by_teacher(self._cache):
            nothing = np.zeros(0, np.int32)
            return np.zeros(len(tokens), np.int64), nothing, nothing.astype(np.float32), nothing
        kept = choose(self._cache, logprobs, tokens, self._generator)
        return (
            kept.counts.cpu().numpy(),
            kept.ids.int().cpu().numpy(),
            kept.logprobs.cpu().numpy(),
            kept.draws.cpu().numpy().astype(np.uint16),
        )

    def _finish(self, traces: list[_Trace]) -> pa.RecordBatch:
        """A ROLLOUT batch of finished responses."""
        prompts = pa.RecordBatch.from_pylist([trace.row for trace in traces], PROMPT)
        lengths = [len(trace.ids) for trace in traces]
        kept = [len(ids) for trace in traces for ids in trace.cache_ids]
        ids = _flat([ids for trace in traces for ids in trace.cache_ids], np.int32)
        logprobs = _flat([lp for trace in traces for lp in trace.cache_logprobs], np.float32)
        draws = _flat([part for trace in traces for part in trace.cache_draws], np.uint16)
        counted = [len(part) for trace in traces for part in trace.cache_draws]
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
                nest(ragged(draws, counted), lengths),
            ],
        )

    def _verify(self, trace: _Trace) -> bool | None:
        answer = trace.row["answer"]
        if answer is None:
            return None
        return VERIFIERS[trace.row["verifier"]](self._decode(trace.ids), answer)


def _flat(parts: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
