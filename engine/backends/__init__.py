"""Samplers: the student as a machine that advances all its running responses by one token.

`hf` is plain transformers, the reference that every other path is compared with; `vllm` is the fast
one. Both show the whole distribution that each token was drawn from, so that log-probabilities and
cached ids are made in one place, from the truth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.weights import Weights


@dataclass(frozen=True)
class Request:
    """A response to be sampled."""

    ticket: int
    prompt_ids: Sequence[int]
    max_new_tokens: int
    seed: int
    """Seeds this response alone, where the backend can, so that it doesn't depend on the company it
    is sampled in."""
    greedy: bool = False
    urgent: bool = False
    """Starts with the next step, whether or not there is a free slot."""


@dataclass(frozen=True)
class Decoded:
    """What one decoding step emitted; r responses advanced by one token each."""

    tickets: list[int]
    token_ids: Tensor
    """[r] int64."""
    logprobs: Tensor
    """[r, V] float32: log-softmax of the logits over temperature, over the tokenizer's ids only."""
    finished: dict[int, str]
    """Finish reason, `stop` or `length`, of the responses that ended with this token."""

    def without(self, ticket: int) -> tuple[Tensor, "Decoded"]:
        """[V] the log-probabilities of one response that ended, and the step without it."""
        row = self.tickets.index(ticket)
        others = [index for index in range(len(self.tickets)) if index != row]
        rest = Decoded(
            [self.tickets[index] for index in others],
            self.token_ids[others],
            self.logprobs[others],
            {other: reason for other, reason in self.finished.items() if other != ticket},
        )
        return self.logprobs[row], rest


class Sampler(Protocol):
    """One model with its running responses. Weights may be loaded between any two steps; running
    responses go on."""

    @property
    def running(self) -> int:
        """Responses added and not finished."""

    def add(self, request: Request) -> None:
        """Queues a response; it starts with one of the next steps."""

    def step(self) -> Decoded:
        """Advances by one token the responses that have a slot; some may wait for theirs."""

    def load(self, weights: Weights, reprefill: bool = False) -> None:
        """Replaces the model's weights. Running responses keep the keys and values that they have,
        or have them computed again under the new weights."""


def vllm_environment(cores: Sequence[int], memory_gib: float) -> dict[str, str]:
    """Environment variables that vLLM needs when it is imported; `cores` are empty on a GPU."""
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine stays in our process
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(memory_gib))),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if cores:  # unpinned threads wait for each other: ten times slower on a busy machine
        environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    return environment
