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

    @classmethod
    def of(cls, metas: list[RolloutMeta], divergence: float, tokens: int) -> "Figures":
        """From responses and their divergence, summed over `tokens` tokens."""
        judged = [meta.correct for meta in metas if meta.correct is not None]
        return cls(
            accuracy=sum(judged) / len(judged) if judged else None,
            kl=divergence / max(1, tokens),
            mean_length=sum(meta.response_tokens for meta in metas) / len(metas),
            finished=sum(meta.finish_reason == "stop" for meta in metas) / len(metas),
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
    total, tokens = 0.0, 0
    chunk = positions_per_chunk(ours.vocabulary)
    for rows in split(lengths, np.arange(len(lengths)), TOKENS_PER_PASS):
        inputs = sequences(batch, rows).to(ours.device)
        pairs = zip(
            ours.hidden(inputs).split(chunk), theirs.hidden(inputs).split(chunk), strict=True
        )
        for our_states, their_states in pairs:
            log_p = ours.logprobs(our_states, temperature)
            log_q = theirs.logprobs(their_states, teacher_temperature)
            total += (log_p.exp() * (log_p - log_q)).sum().item()
            tokens += len(log_p)
    return Figures.of(report.metas, total, tokens)
