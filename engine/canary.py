"""The canary: what the learner says after a fixed prompt, which a sampler of the same weights must
say too.

It travels with every published version. A worker that has taken the version samples one token after
the prompt and compares the whole distribution before it gives any token away, so that a sampler
whose weights aren't the learner's, or that computes them otherwise, ends the run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Tokens of the prompt, where a run's responses may be so long.
LENGTH = 32
# Mean difference of the log-probabilities, in nats, that rounding may make.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}


class WrongSamplerError(RuntimeError):
    """A sampler and the learner give the same text different probabilities."""


@dataclass(frozen=True)
class Canary:
    """The learner's distribution after a fixed prompt."""

    family: str
    prompt_ids: Sequence[int]
    logprobs: np.ndarray
    """[V] float32, at the sampling temperature."""
    tolerance: float
    """In nats."""

    def compare(self, logprobs: Tensor, version: int) -> None:
        """Raises WrongSamplerError if the sampler's distribution ([V]) is another one."""
        theirs = logprobs.double().cpu().numpy()
        difference = float((np.exp(theirs) * np.abs(theirs - self.logprobs)).sum())
        if not difference <= self.tolerance:  # not a number fails too
            raise WrongSamplerError(
                f"{self.family}: with the weights of version {version}, sampler and learner differ "
                f"by {difference:.3g} nats in the log-probabilities of the token after a fixed "
                f"prompt, of which {self.tolerance:g} may be rounding; the sampler has other "
                "weights, or computes this family in another way. Try rollout.backend=hf, or "
                "student.dtype=float32 if it is bfloat16, and report this model"
            )
