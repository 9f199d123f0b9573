"""The student as a learner: SCORED → gradient steps → weights.

A step takes one batch of responses, makes `passes` x `mini_batches` updates over it, and publishes
weights once. The reduction is a mean over the counted tokens of a whole update, so that neither
padding, nor the split into micro-batches, nor the response lengths change the gradient.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.batch import Sequences, StepBatch, merge
from engine.config import Dense, Estimator, ReverseKL, RunConfig
from engine.estimators import loss_of
from engine.head import chunked_loss
from engine.models import Language
from engine.optimizer import Optimizer
from engine.schema import SCORED, RolloutMeta, describe
from engine.weights import Weights, publish


@dataclass(frozen=True)
class StepReport:
    """What the driver learns from a step."""

    version: int
    metrics: dict[str, float]
    age_tokens: dict[int, int]
    """Trained tokens by age."""
    trained_tokens: int
    busy_seconds: float


@dataclass
class Sums:
    """Running sums of a step's statistics: a mean is a ratio of sums, whatever the split."""

    tokens: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, statistics: dict[str, Tensor]) -> None:
        self.tokens += len(statistics["ratio"])
        squared = {"ratio_squared": statistics["ratio"] ** 2}
        for name, values in (statistics | squared).items():
            self.sums[name] = self.sums.get(name, 0.0) + values.double().sum().item()

    def merge(self, other: "Sums") -> None:
        self.tokens += other.tokens
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def mean(self, name: str) -> float:
        return self.sums.get(name, 0.0) / max(1, self.tokens)


class LearnerWorker:
    """Owns the student's master weights and its optimizer."""

    def __init__(self, student: Language, dtype: torch.dtype, config: RunConfig) -> None:
        self._student = student
        self._dtype = dtype  # of activations and published weights
        self._config = config
        self._loss = loss_of(config.estimator)
        self._optimizer = Optimizer(student.model, config.optimizer, config.training.steps)
        self.version = 0
        student.model.eval()  # dropout would make the learner another model than the sampler's

    def step(
        self, batches: list[pa.RecordBatch], rows: list[list[int]]
    ) -> tuple[Weights, StepReport]:
        """Trains on these rows of SCORED batches and publishes the next version."""
        start = time.perf_counter()
        batch = self._load(merge(batches, rows))
        lr = self._optimizer.schedule(self.version)
        norms: list[float] = []
        before = Sums()
        deviation = 0.0
        for update, mini in enumerate(self._mini_batches(batch)):
            sums, norm, worst = self._update(batch, mini)
            if update < self._config.training.mini_batches:  # the first pass sees each token once
                before.merge(sums)
            if update == 0:
                deviation = worst
            norms.append(norm)
        self.version += 1
        metrics = self._metrics(batch, before, norms) | {
            "train/lr": lr,
            "policy/ratio_deviation": deviation,
        }
        weights = self.published()
        counted = batch.ages[batch.counted]
        ages, tokens = np.unique(counted, return_counts=True)
        report = StepReport(
            self.version,
            metrics,
            dict(zip(ages.tolist(), tokens.tolist(), strict=True)),
            len(counted),
            time.perf_counter() - start,
        )
        return weights, report

    def published(self) -> Weights:
        """The current version, as rollout workers fetch it."""
        return publish(self._student.named_parameters(), self.version, self._dtype)

    @torch.inference_mode()
    def divergence(self, batches: list[pa.RecordBatch], rows: list[list[int]]) -> tuple[float, int]:
        """Exact KL(student || teacher) of densely scored rows, summed over tokens, and their
        number."""
        batch = self._load(merge(batches, rows), ReverseKL(cache=Dense()), bounded=False)
        total, tokens = 0.0, 0
        for part in batch.split(batch.rows, self._config.training.micro_tokens):
            micro = batch.micro(part, self._student.device)
            loss, _ = chunked_loss(
                self._hidden(micro.sequences),
                self._student.head,
                loss_of(ReverseKL(cache=Dense())),
                micro.support,
                vocabulary=self._student.vocabulary,
                temperature=self._config.rollout.temperature,
            )
            total += loss.item()
            tokens += len(micro.support)
        return total, tokens

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
        with torch.no_grad():
            for name, parameter in self._student.named_parameters():
                parameter.copy_(weights[name])
        self._optimizer.load_state(load_file(folder / "optimizer.safetensors"))
        self.version = version
        path = folder / "buffer.arrow"
        if path.exists():
            with pa.memory_map(str(path)) as file:
                buffer = pa.ipc.open_file(file).get_batch(0)
        else:
            buffer = pa.RecordBatch.from_pylist([], SCORED)
        return self.published(), buffer, describe(buffer)

    def _load(
        self, batch: pa.RecordBatch, estimator: Estimator | None = None, bounded: bool = True
    ) -> StepBatch:
        bound = self._config.staleness.max if bounded else np.iinfo(np.int32).max
        cache = (estimator or self._config.estimator).cache
        return StepBatch(batch, cache, self.version, bound, self._student.vocabulary)

    def _mini_batches(self, batch: StepBatch) -> Iterator[np.ndarray]:
        """Rows of each update. The order is a function of (seed, version): nothing to save."""
        rng = np.random.default_rng([self._config.seed, self.version])
        for _ in range(self._config.training.passes):
            yield from np.array_split(
                rng.permutation(batch.rows), self._config.training.mini_batches
            )

    def _update(self, batch: StepBatch, rows: np.ndarray) -> tuple[Sums, float, float]:
        """One optimizer update. Returns statistics before it, the gradient's norm, and the largest
        deviation of a fresh token's ratio from 1."""
        tokens = batch.counted_tokens(rows)
        sums, worst = Sums(), 0.0
        self._student.model.zero_grad(set_to_none=True)
        for part in batch.split(rows, self._config.training.micro_tokens):
            micro = batch.micro(part, self._student.device)
            loss, statistics = chunked_loss(
                self._hidden(micro.sequences),
                self._student.head,
                self._loss,
                micro.support,
                vocabulary=self._student.vocabulary,
                temperature=self._config.rollout.temperature,
            )
            (loss / max(1, tokens)).backward()
            sums.add(statistics)
            fresh = (statistics["ratio"].cpu()[micro.fresh] - 1).abs()
            worst = max(worst, fresh.max().item() if len(fresh) else 0.0)
        parameters = list(self._student.model.parameters())
        norm = torch.nn.utils.clip_grad_norm_(parameters, self._config.optimizer.clip).item()
        # A norm that isn't finite leaves the update out, and is counted; so do masked tokens only,
        # on which momentum and weight decay would go on by themselves.
        if np.isfinite(norm) and tokens:
            self._optimizer.step()
        return sums, norm, worst

    def _hidden(self, sequences: Sequences) -> Tensor:
        """Hidden states in the run's type of activations; master weights stay float32."""
        reduced = self._dtype != torch.float32
        with torch.autocast(self._student.device.type, self._dtype, enabled=reduced):
            return self._student.hidden(sequences)

    def _metrics(self, batch: StepBatch, before: Sums, norms: list[float]) -> dict[str, float]:
        finite = [norm for norm in norms if np.isfinite(norm)]
        ages = batch.ages[batch.counted]
        squares = before.sums.get("ratio_squared", 0.0) * max(1, before.tokens)
        return {
            "train/loss": before.mean("kl"),
            "train/entropy": before.mean("entropy"),
            "train/grad_norm": float(np.mean(finite)) if finite else float("inf"),
            "train/skipped_updates": len(norms) - len(finite),
            "train/tokens": len(ages),
            "policy/ratio_mean": before.mean("ratio"),
            "policy/effective_sample": before.sums.get("ratio", 0.0) ** 2 / max(squares, 1e-30),
            "cache/kept_ids": before.mean("kept"),
            "cache/covered_mass": before.mean("covered"),
            "staleness/mean_age": float(ages.mean()) if len(ages) else 0.0,
            "staleness/max_age": float(ages.max()) if len(ages) else 0.0,
            "staleness/masked_tokens": int((~batch.counted).sum()),
        }
