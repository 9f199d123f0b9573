"""The language-model head and the loss on top of it, in chunks of positions.

    hidden [n, D] --chunk--> logits [chunk, V] -> log-softmax -> loss -> gradients, added up
                     ^                                                         |
                     +------------------ next chunk ---------------------------+

Logits over a real vocabulary are the largest tensor of a training step: 8,192 positions of 152,000
ids are 5 GB in float32, several times over in a backward pass. Here a chunk's gradients with
respect to its hidden states and to the head's weight are taken as soon as its loss is known, while
its logits are still there. The backward pass then multiplies them by one number. Nothing is
computed twice, and no more than one chunk of logits is ever alive.

Left out: second derivatives, and a second backward pass through the same loss, for the first one
scales the gradients where they are: a copy would be as large as the head.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from engine.estimators import Loss
from engine.support import Support

# 64 MiB in float32. A chunk holds about six such tensors at its peak: logits, their log-softmax,
# the statistics' exponentials, gradients. Smaller chunks add up the head's gradient more often.
LOGITS_PER_CHUNK = 2**24

# Rows of the weight whose gradient is added up at once where types differ, so that what is added
# stays small beside the sum.
ROWS_PER_SUM = 4096


def _as_they_are(logits: Tensor) -> Tensor:
    return logits


class Head(torch.nn.Module):
    """The map from hidden states to logits: a projection, with what some families of models do to
    its output, such as a soft cap. `finish` has no parameters and leaves the positions apart."""

    def __init__(
        self, projection: torch.nn.Linear, finish: Callable[[Tensor], Tensor] = _as_they_are
    ) -> None:
        super().__init__()
        self.projection = projection
        self.finish = finish

    def forward(self, hidden: Float[Tensor, "*n D"]) -> Float[Tensor, "*n V"]:
        return self.finish(self.projection(hidden))


class TeacherHead:
    """The teacher's head at the learner: makes log q of last hidden states, in the head's type."""

    def __init__(self, head: Head, vocabulary: int, temperature: float) -> None:
        self._head = head.requires_grad_(False)
        self._vocabulary = vocabulary
        self._temperature = temperature

    def logprobs(self, hidden: Float[Tensor, "n D"]) -> Float[Tensor, "n V"]:
        states = hidden.to(self._head.projection.weight.dtype)
        return log_softmax(self._head(states), self._vocabulary, self._temperature)


def log_softmax(
    logits: Float[Tensor, "n all"], vocabulary: int, temperature: float
) -> Float[Tensor, "n V"]:
    """In float32, over the tokenizer's ids: those beyond are embedding padding."""
    return (logits[..., :vocabulary].float() / temperature).log_softmax(-1)


def positions_per_chunk(vocabulary: int) -> int:
    """How many positions' logits are alive at the same time."""
    return max(1, LOGITS_PER_CHUNK // vocabulary)


def chunked_loss(
    hidden: Float[Tensor, "n D"],
    head: Head,
    loss: Loss,
    support: Support,
    *,
    vocabulary: int,
    temperature: float,
    teacher: TeacherHead | None = None,
    chunk: int | None = None,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Sum of the tokens' losses, and their statistics.

    `hidden` row i is the state that predicts token i of `support`: whoever cuts it out of a
    sequence does the shift by one. Ids from `vocabulary` on are embedding padding and left out
    before normalising. `temperature` is the sampler's. `teacher` makes scores of the support's
    hidden states, if it has some. `chunk` is derived if not given.
    Matrices are multiplied in the type of `hidden`, or of autocast; log-softmax, loss and sums are
    float32. Without gradients, in evaluation for instance, only values are computed.
    """
    if len(hidden) != len(support):
        raise ValueError(f"{len(hidden)} hidden states for {len(support)} cached tokens")
    chunk = chunk or positions_per_chunk(vocabulary)
    # An empty batch is one empty chunk: a 0 with a gradient, and the statistics' names.
    chunks = [slice(start, start + chunk) for start in range(0, max(len(hidden), 1), chunk)]
    work = _Work(
        head, loss, support, vocabulary, temperature, teacher, chunks, _multiplied_in(hidden)
    )
    weight, bias = head.projection.weight, head.projection.bias
    needed = hidden.requires_grad or weight.requires_grad
    with torch.autocast(hidden.device.type, enabled=False):
        if torch.is_grad_enabled() and needed:
            total: Tensor = _LossWithGradients.apply(work, hidden, weight, bias)
        else:
            total = sum(
                (work.losses(work.logits(hidden[tokens]), tokens).sum() for tokens in chunks),
                hidden.new_zeros((), dtype=torch.float32),
            )
    return total, {name: torch.cat([part[name] for part in work.parts]) for name in work.parts[0]}


def _multiplied_in(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


@dataclass(frozen=True)
class _Work:
    """What is to be done with each chunk."""

    head: Head
    loss: Loss
    support: Support
    vocabulary: int
    temperature: float
    teacher: TeacherHead | None
    chunks: list[slice]
    dtype: torch.dtype
    """Of the matrix products."""
    parts: list[dict[str, Tensor]] = field(default_factory=list)
    """Statistics of the chunks done."""

    @cached_property
    def weights(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the projection, in the type of the products."""
        weight, bias = self.head.projection.weight, self.head.projection.bias
        return weight.detach().to(self.dtype), bias if bias is None else bias.detach().to(
            self.dtype
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Output of the projection, with embedding padding and before `finish`."""
        return linear(hidden.detach().to(self.dtype), *self.weights)

    def losses(self, projected: Tensor, tokens: slice) -> Tensor:
        logprobs = log_softmax(self.head.finish(projected), self.vocabulary, self.temperature)
        losses, statistics = self.loss(logprobs, self._scored(self.support[tokens]))
        self.parts.append(statistics)
        return losses

    def _scored(self, support: Support) -> Support:
        if len(support.teacher_hidden) == 0:
            return support
        if self.teacher is None:
            raise ValueError("the teacher's hidden states are of no use without its head")
        with torch.no_grad():
            return support.scored(self.teacher.logprobs(support.teacher_hidden))


class _LossWithGradients(torch.autograd.Function):
    """Sums the losses of all chunks, and their gradients at the same time."""

    @staticmethod
    def forward(
        ctx: Any, work: _Work, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        _, by_hidden, by_weight, by_bias = ctx.needs_input_grad
        total = hidden.new_zeros((), dtype=torch.float32)
        sums = [
            torch.zeros_like(hidden) if by_hidden else None,
            # A sum over many chunks takes float32, also where the head is bfloat16.
            torch.zeros_like(weight, dtype=torch.float32) if by_weight else None,
            torch.zeros_like(bias, dtype=torch.float32) if bias is not None and by_bias else None,
        ]
        for tokens in work.chunks:
            total += _add_gradients(work, hidden[tokens].to(work.dtype), tokens, sums)
        ctx.gradients = sums
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradients of this loss have been taken; compute it again")
        gradients, ctx.gradients = ctx.gradients, None
        scaled: list[Tensor | None] = []
        while gradients:  # one at a time: each is as large as the head
            gradient = gradients.pop(0)
            kind = ctx.dtypes[len(scaled)]
            scaled.append(gradient if gradient is None else gradient.mul_(upstream).to(kind))
        return None, *scaled


def _add_gradients(
    work: _Work, part: Tensor, tokens: slice, sums: list[Tensor | None]
) -> Float[Tensor, ""]:
    """One chunk's loss; its gradients go to the sums. All that is large dies with this frame."""
    by_hidden, by_weight, by_bias = sums
    projected = work.logits(part).requires_grad_()
    with torch.enable_grad():
        value = work.losses(projected, tokens).sum()
    (gradient,) = torch.autograd.grad(value, projected)
    del projected
    if by_hidden is not None:
        by_hidden[tokens] = (gradient @ work.weights[0]).to(by_hidden.dtype)
    if by_weight is not None:
        _add_product(by_weight, gradient, part)
    if by_bias is not None:
        by_bias += gradient.sum(0, dtype=torch.float32)
    return value.detach()


def _add_product(
    total: Float[Tensor, "V D"], gradient: Float[Tensor, "chunk V"], part: Float[Tensor, "chunk D"]
) -> None:
    """total += gradient^T part, without a second tensor of that size."""
    if gradient.dtype == total.dtype:
        total.addmm_(gradient.T, part)
        return
    for start in range(0, len(total), ROWS_PER_SUM):
        rows = slice(start, start + ROWS_PER_SUM)
        total[rows] += gradient[:, rows].T @ part
