"""Held-out figures of a model, and an evaluator that shares nothing with a run but the models.

`evaluate` samples with plain transformers and sums the divergence over the whole vocabulary. A run
gets the same figures faster from its own workers; a test compares the two.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from engine.batch import sequences, split
from engine.config import Sampled
from engine.head import positions_per_chunk
from engine.models import Language, pick_device
from engine.prompts import Prompt, to_batch
from engine.rollout import RolloutWorker
from engine.schema import RolloutMeta, row_lengths

# The name of the set that `evaluation.path` gives, beside those of the gate's guards.
HELD_OUT = "held-out"
SLOTS = 128
TOKENS_PER_PASS = 8192


@dataclass(frozen=True)
class Figures:
    """What a model does on the held-out prompts."""

    accuracy: float | None
    """Responses that the verifier accepts, of those with an answer; None without answers."""
    kl: float
    """Exact KL(student || teacher) per token on the model's own responses, in nats."""
    mean_length: float
    """Tokens."""
    finished: float
    """Fraction of responses that ended by end-of-sequence."""


@dataclass(frozen=True)
class Outcomes:
    """What a model does on each prompt of a set, in the order of the set; [prompts] each."""

    correct: np.ndarray
    """1 where the verifier accepts the response, 0 where not, NaN without an answer."""
    divergence: np.ndarray
    """Exact KL(student || teacher) of the response, summed over its tokens, in nats."""
    tokens: np.ndarray
    finished: np.ndarray

    @classmethod
    def of(cls, metas: list[RolloutMeta], divergence: np.ndarray) -> "Outcomes":
        """From one response to each prompt, and its divergence."""
        return cls(
            np.array([np.nan if meta.correct is None else meta.correct for meta in metas], float),
            divergence,
            np.array([meta.response_tokens for meta in metas]),
            np.array([meta.finish_reason == "stop" for meta in metas]),
        )

    @property
    def figures(self) -> Figures:
        judged = self.correct[~np.isnan(self.correct)]
        return Figures(
            accuracy=float(judged.mean()) if len(judged) else None,
            kl=float(self.divergence.sum() / max(1, self.tokens.sum())),
            mean_length=float(self.tokens.mean()),
            finished=float(self.finished.mean()),
        )

    def take(self, rows: np.ndarray | slice) -> "Outcomes":
        """These prompts' outcomes."""
        return Outcomes(
            self.correct[rows], self.divergence[rows], self.tokens[rows], self.finished[rows]
        )


def evaluate(
    student: Path,
    teacher: Path,
    prompts: list[Prompt],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    teacher_temperature: float = 1.0,
    seed: int = 0,
) -> Figures:
    """Figures of the model in `student` against the one in `teacher`, in this process."""
    return evaluate_models(
        Language(student, torch.float32, pick_device()),
        Language(teacher, torch.float32, pick_device()),
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        teacher_temperature=teacher_temperature,
        seed=seed,
    )


@torch.inference_mode()
def evaluate_models(
    ours: Language,
    theirs: Language,
    prompts: list[Prompt],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    teacher_temperature: float = 1.0,
    seed: int = 0,
) -> Figures:
    """As `evaluate`, of models in memory."""
    sampler = ours.sampler(temperature, SLOTS)
    worker = RolloutWorker(sampler, ours.decode, Sampled(), max_new_tokens, seed)
    batch, report = worker.generate(to_batch(prompts, range(len(prompts)), [0] * len(prompts)))
    lengths = row_lengths(batch, "prompt_ids") + row_lengths(batch, "response_ids")
    totals = np.zeros(len(lengths))
    responses = row_lengths(batch, "response_ids")
    chunk = positions_per_chunk(ours.vocabulary)
    for rows in split(lengths, np.arange(len(lengths)), TOKENS_PER_PASS):
        inputs = sequences(batch, rows).to(ours.device)
        pairs = zip(
            ours.hidden(inputs).split(chunk), theirs.hidden(inputs).split(chunk), strict=True
        )
        sums = []
        for our_states, their_states in pairs:
            log_p = ours.logprobs(our_states, temperature)
            log_q = theirs.logprobs(their_states, teacher_temperature)
            sums.append((log_p.exp() * (log_p - log_q)).sum(-1).double().cpu().numpy())
        np.add.at(totals, np.repeat(rows, responses[rows]), np.concatenate(sums))
    return Outcomes.of(report.metas, totals).figures
