"""The student as a learner: SCORED → gradient steps → weights.

A step takes one batch of responses, makes `passes` x `mini_batches` updates over it, and publishes
weights once. The reduction is a mean over the counted tokens of a whole update, so that neither
padding, nor the split into micro-batches, nor the response lengths change the gradient.
"""

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import canary
from engine.batch import MicroBatch, StepBatch, merge
from engine.config import M2PO, Decoupled, Dense, Estimator, ReverseKL, RunConfig, Stabiliser
from engine.estimators import Loss, loss_of, m2po_bound, possible_ids, proximal_logprobs
from engine.head import TeacherHead, chunked_loss
from engine.metrics import by_age
from engine.models import Language, teacher_head
from engine.names import fill
from engine.optimizer import Optimizer
from engine.schema import SCORED, RolloutMeta, describe
from engine.weights import Weights, publish

EXACT = ReverseKL(cache=Dense())


@dataclass(frozen=True)
class StepReport:
    """What the driver learns from a step."""

    version: int
    metrics: dict[str, float]
    age_tokens: dict[int, int]
    """Trained tokens by age."""
    trained_tokens: int
    busy_seconds: float
    cpu_seconds: float
    """Of the worker's process, since it began."""


@dataclass(frozen=True)
class PublishReport:
    """What the driver learns of published weights."""

    version: int
    seconds: float
    """That packing took, beside the next step."""
    nbytes: int


class Tally:
    """The statistics of a step's tokens, each token once."""

    def __init__(self) -> None:
        self._parts: dict[str, list[np.ndarray]] = {}

    def add(self, statistics: dict[str, Tensor]) -> None:
        for name, values in statistics.items():
            self._parts.setdefault(name, []).append(values.double().cpu().numpy())

    def column(self, name: str) -> np.ndarray:
        """One value for each token."""
        return np.concatenate(self._parts.get(name, [np.zeros(0)]))

    def mean(self, name: str) -> float:
        column = self.column(name)
        return float(column.mean()) if len(column) else 0.0

    def policy(self, tokens: np.ndarray) -> dict[str, float]:
        """How far these tokens (indices or a mask) have been left behind by the learner."""
        ratio = self.column("ratio")[tokens]
        if len(ratio) == 0:
            return {}
        low, high = np.quantile(ratio, [0.05, 0.95])
        clipped, kept = (self.column(name)[tokens].sum() for name in ("clipped", "kept"))
        squares = len(ratio) * np.square(ratio).sum()
        return {
            "policy/effective_sample": float(ratio.sum() ** 2 / max(squares, 1e-30)),
            "policy/ratio_q05": float(low),
            "policy/ratio_q95": float(high),
            "policy/clipped_share": float(clipped / max(kept, 1.0)),
            "cache/tail_mass": float(1 - self.column("covered")[tokens].mean()),
        }


class LearnerWorker:
    """Owns the student's master weights and its optimizer.

    `load`, `step` and `published` may run at the same time, one call of each: the next batch is
    prepared, and the last version packed, while a step is under way. A step's first update waits
    until its weights, which are the last version's, have been packed."""

    def __init__(self, student: Language, dtype: torch.dtype, config: RunConfig) -> None:
        self._student = student
        self.teacher: TeacherHead | None = None
        self._dtype = dtype  # of activations and published weights
        self._config = config
        self._optimizer = Optimizer(student.model, config.optimizer, config.training.steps)
        self.version = 0
        student.model.eval()  # dropout would make the learner another model than the sampler's
        self._loaded: dict[int, StepBatch] = {}
        self._packer = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._publish()

    def imitate(self, teacher: Path, head: Weights) -> None:
        """Takes the head of the teacher in a folder, to make scores of its hidden states."""
        settings, student = self._config.teacher, self._student
        self.teacher = teacher_head(
            teacher,
            head,
            student.vocabulary,
            settings.temperature,
            student.device,
            settings.trust_remote_code,
        )

    def load(self, batches: list[pa.RecordBatch], rows: list[list[int]], version: int) -> None:
        """Prepares these rows of SCORED batches for the step that this version will make."""
        self._loaded[version] = self._batch(merge(batches, rows), version)

    def step(self) -> StepReport:
        """Trains on the batch that was loaded for this version, and makes the next."""
        start = time.perf_counter()
        batch = self._loaded.pop(self.version)
        lr = self._optimizer.schedule(self.version)
        if isinstance(self._stabiliser, Decoupled):
            batch.set_proximal(self._proximal(batch))
        norms: list[float] = []
        tally = Tally()
        deviation = 0.0
        for update, mini in enumerate(self._mini_batches(batch)):
            # The first pass sees each token once.
            first_pass = update < self._config.training.mini_batches
            norm, worst = self._update(batch, mini, tally if first_pass else Tally())
            if update == 0:
                deviation = worst
            norms.append(norm)
        self.version += 1
        metrics = self._metrics(batch, tally, norms) | {
            "train/lr": lr,
            "policy/ratio_deviation": deviation,
        }
        self._publish()
        counted = batch.ages[batch.counted]
        ages, tokens = np.unique(counted, return_counts=True)
        return StepReport(
            self.version,
            metrics,
            dict(zip(ages.tolist(), tokens.tolist(), strict=True)),
            len(counted),
            time.perf_counter() - start,
            time.process_time(),
        )

    def published(self) -> tuple[Weights, PublishReport]:
        """The newest version, as rollout workers fetch it."""
        weights, seconds = self._packed.result()
        return weights, PublishReport(weights.version, seconds, weights.nbytes)

    def _publish(self) -> None:
        """Begins to pack the present weights."""
        rollout = self._config.rollout
        length = min(canary.LENGTH, rollout.max_new_tokens)
        check = self._student.canary(rollout.temperature, length, self._dtype)
        self._packed = self._packer.submit(self._pack, self.version, check)

    def _pack(self, version: int, check: canary.Canary) -> tuple[Weights, float]:
        start = time.perf_counter()
        weights = publish(self._student.tensors().items(), version, self._dtype, check)
        return weights, time.perf_counter() - start

    @torch.inference_mode()
    def divergence(self, batches: list[pa.RecordBatch], rows: list[list[int]]) -> np.ndarray:
        """[rows] exact KL(student || teacher) of densely scored rows, each summed over its
        tokens."""
        batch = self._batch(merge(batches, rows), self.version, EXACT)
        totals = np.zeros(len(batch.rows))
        for part in batch.split(batch.rows, self._config.training.micro_tokens):
            _, statistics = self._loss(batch.micro(part, self._student.device), loss_of(EXACT))
            owners = np.repeat(part, batch.lengths[part])
            np.add.at(totals, owners, statistics["kl"].double().cpu().numpy())
        return totals

    def save(self, folder: Path, batches: list[pa.RecordBatch], rows: list[list[int]]) -> None:
        """Writes model, optimizer and the buffer's rows: safetensors and Arrow, no pickles."""
        self._student.save(folder / "model")
        state = {name: tensor.contiguous() for name, tensor in self._optimizer.state().items()}
        save_file(state, folder / "optimizer.safetensors")
        if batches:
            merged = merge(batches, rows)
            with pa.ipc.new_file(str(folder / "buffer.arrow"), merged.schema) as file:
                file.write_batch(merged)

    def restore(
        self, folder: Path, version: int
    ) -> tuple[Weights, pa.RecordBatch, list[RolloutMeta]]:
        """Takes back what `save` wrote; returns weights for the rollout workers, and the rows that
        were in the buffer."""
        weights: dict[str, Tensor] = {}
        for shard in sorted((folder / "model").glob("*.safetensors")):
            weights |= load_file(shard)
        fill(self._student.model, weights)
        self._optimizer.load_state(load_file(folder / "optimizer.safetensors"))
        self.version = version
        self._loaded.clear()
        self._publish()
        path = folder / "buffer.arrow"
        if path.exists():
            with pa.memory_map(str(path)) as file:
                buffer = pa.ipc.open_file(file).get_batch(0)
        else:
            buffer = pa.RecordBatch.from_pylist([], SCORED)
        return self.published()[0], buffer, describe(buffer)

    def _batch(
        self, batch: pa.RecordBatch, version: int, estimator: Estimator | None = None
    ) -> StepBatch:
        """For training at a version; or for another estimator than the run's, of any age."""
        bound = np.iinfo(np.int32).max if estimator else self._config.staleness.max
        cache = (estimator or self._config.estimator).cache
        return StepBatch(batch, cache, version, bound, self._student.vocabulary)

    def _mini_batches(self, batch: StepBatch) -> Iterator[np.ndarray]:
        """Rows of each update. The order is a function of (seed, version): nothing to save."""
        rng = np.random.default_rng([self._config.seed, self.version])
        for _ in range(self._config.training.passes):
            yield from np.array_split(
                rng.permutation(batch.rows), self._config.training.mini_batches
            )

    def _update(self, batch: StepBatch, rows: np.ndarray, tally: Tally) -> tuple[float, float]:
        """One optimizer update; adds the tokens' statistics before it. Returns the gradient's norm,
        and the largest deviation of a fresh token's ratio from 1."""
        tokens = batch.counted_tokens(rows)
        worst = 0.0
        loss = loss_of(self._config.estimator, self._bound(batch, rows))
        self._student.model.zero_grad(set_to_none=True)
        for micro in self._micro_batches(batch, rows):
            total, statistics = self._loss(micro, loss)
            (total / max(1, tokens)).backward()
            tally.add(statistics | {"age": micro.ages})
            fresh = (statistics["ratio"].cpu()[micro.fresh] - 1).abs()
            worst = max(worst, fresh.max().item() if len(fresh) else 0.0)
        parameters = list(self._student.model.parameters())
        norm = torch.nn.utils.clip_grad_norm_(parameters, self._config.optimizer.clip).item()
        # A norm that isn't finite leaves the update out, and is counted; so do masked tokens only,
        # on which momentum and weight decay would go on by themselves.
        if np.isfinite(norm) and tokens:
            self._packed.result()
            self._optimizer.step()
        return norm, worst

    def _micro_batches(self, batch: StepBatch, rows: np.ndarray) -> Iterator[MicroBatch]:
        for part in batch.split(rows, self._config.training.micro_tokens):
            yield batch.micro(part, self._student.device)

    def _loss(self, micro: MicroBatch, loss: Loss) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of the tokens' losses, and their statistics. Products are in the run's type of
        activations; master weights stay float32."""
        reduced = self._dtype != torch.float32
        with torch.autocast(self._student.device.type, self._dtype, enabled=reduced):
            return chunked_loss(
                self._student.hidden(micro.sequences),
                self._student.head,
                loss,
                micro.support,
                vocabulary=self._student.vocabulary,
                temperature=self._config.rollout.temperature,
                teacher=self.teacher,
            )

    @property
    def _stabiliser(self) -> Stabiliser | None:
        estimator = self._config.estimator
        return estimator.stabiliser if isinstance(estimator, ReverseKL) else None

    @torch.no_grad()
    def _proximal(self, batch: StepBatch) -> np.ndarray:
        """log p of every entry that counts, before the step's first update."""
        logprobs = np.zeros(batch.entries, np.float32)
        for micro in self._micro_batches(batch, batch.rows):
            _, statistics = self._loss(micro, proximal_logprobs)
            logprobs[micro.entries] = statistics["log_p"].float().cpu().numpy()
        return logprobs

    @torch.no_grad()
    def _bound(self, batch: StepBatch, rows: np.ndarray) -> float:
        """M2PO's bound for an update: solved over all its micro-batches, so that the split into
        them changes nothing."""
        stabiliser = self._stabiliser
        if not isinstance(stabiliser, M2PO):
            return math.inf
        ratios, signals = [], []
        for micro in self._micro_batches(batch, rows):
            log_p = self._loss(micro, proximal_logprobs)[1]["log_p"]
            log_p_old, log_q = micro.support.sampler_logprobs, micro.support.teacher_logprobs
            # An impossible id has no gradient, and no finite ratio.
            kept = possible_ids(log_p, log_q, log_p_old)
            log_p, log_q, log_p_old = log_p[kept], log_q[kept], log_p_old[kept]
            ratios.append(log_p - log_p_old)
            signals.append(log_q - (log_p if stabiliser.signal == "learner" else log_p_old))
        if not ratios:
            return math.inf
        return m2po_bound(torch.cat(ratios), torch.cat(signals), stabiliser.budget)

    def _metrics(self, batch: StepBatch, tally: Tally, norms: list[float]) -> dict[str, float]:
        finite = [norm for norm in norms if np.isfinite(norm)]
        ages = tally.column("age")
        metrics = {
            "train/loss": tally.mean("kl"),
            "train/entropy": tally.mean("entropy"),
            "train/grad_norm": float(np.mean(finite)) if finite else float("inf"),
            "train/skipped_updates": len(norms) - len(finite),
            "train/tokens": len(ages),
            "policy/ratio_mean": tally.mean("ratio"),
            "cache/kept_ids": tally.mean("kept"),
            "cache/bytes": batch.cached_bytes / max(1, len(batch.ages)),
            "staleness/mean_age": float(ages.mean()) if len(ages) else 0.0,
            "staleness/max_age": float(ages.max()) if len(ages) else 0.0,
            "staleness/masked_tokens": int((~batch.counted).sum()),
        }
        metrics |= tally.policy(np.ones(len(ages), bool))
        for age in np.unique(ages).astype(int).tolist():
            metrics |= {by_age(n, age): v for n, v in tally.policy(ages == age).items()}
        return metrics
