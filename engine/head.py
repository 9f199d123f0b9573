"""The language-model head and the loss on top of it, in chunks of positions.

    hidden [n, D] --chunk--> logits [chunk, V] -> log-softmax -> loss -> gradients, added up
                     ^                                                         |
                     +------------------ next chunk ---------------------------+

Logits over a real vocabulary are the largest tensor of a training step: 8,192 positions of 152,000
ids are 5 GB in float32, several times over in a backward pass. Here a chunk's gradients with
respect to its hidden states and to the head's parameters are taken as soon as its loss is known,
while its logits are still there. The backward pass then multiplies them by one number. Nothing is
computed twice, and no more than one chunk of logits is ever alive.

Left out: second derivatives, and heads whose parameters change identity when the head is called.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.estimators import Loss
from engine.support import Support

# 128 MiB in float32. A chunk holds about six such tensors at its peak: logits, their log-softmax,
# the statistics' exponentials, gradients. Smaller chunks add up the head's gradient more often.
LOGITS_PER_CHUNK = 2**25


TokenLosses = Callable[[Tensor, slice], tuple[Tensor, dict[str, Tensor]]]
"""(hidden states of some tokens, which tokens) -> their losses and statistics."""


class Head(Protocol):
    """Maps hidden states [..., D] to logits [..., at least V]; a module, tied or not."""

    def __call__(self, hidden: Tensor, /) -> Tensor: ...

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...


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
    chunk: int | None = None,
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, " n"]]]:
    """Sum of the tokens' losses, and their statistics.

    `hidden` row i is the state that predicts token i of `support`: whoever cuts it out of a
    sequence does the shift by one. Ids from `vocabulary` on are embedding padding and left out
    before normalising. `temperature` is the sampler's. `chunk` is derived if not given.
    Without gradients, in evaluation for instance, only values are computed.
    """
    if len(hidden) != len(support):
        raise ValueError(f"{len(hidden)} hidden states for {len(support)} cached tokens")

    def token_losses(part: Tensor, tokens: slice) -> tuple[Tensor, dict[str, Tensor]]:
        logits = head(part)[..., :vocabulary].float() / temperature
        return loss(logits.log_softmax(-1), support[tokens])

    chunk = chunk or positions_per_chunk(vocabulary)
    # An empty batch is one empty chunk: a 0 with a gradient, and the statistics' names.
    chunks = [slice(start, start + chunk) for start in range(0, max(len(hidden), 1), chunk)]
    parts: list[dict[str, Tensor]] = []
    parameters = [p for p in head.parameters() if p.requires_grad]
    if torch.is_grad_enabled() and (hidden.requires_grad or parameters):
        arguments = (token_losses, chunks, parts, hidden, *parameters)
        total = _LossWithGradients.apply(*arguments)
    else:
        total = hidden.new_zeros((), dtype=torch.float32)
        for tokens in chunks:
            losses, statistics = token_losses(hidden[tokens], tokens)
            total += losses.sum()
            parts.append(statistics)
    return total, {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


class _LossWithGradients(torch.autograd.Function):
    """Sums the losses of all chunks, and their gradients at the same time."""

    @staticmethod
    def forward(
        ctx: Any,
        token_losses: TokenLosses,
        chunks: list[slice],
        parts: list[dict[str, Tensor]],
        hidden: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        """Also appends each chunk's statistics to `parts`."""
        total = hidden.new_zeros((), dtype=torch.float32)
        hidden_gradient = torch.zeros_like(hidden)
        gradient_sums = [torch.zeros_like(p, dtype=_sum_dtype(p)) for p in parameters]
        for tokens in chunks:
            sums = (hidden_gradient[tokens], *gradient_sums)
            value, statistics = _add_gradients(token_losses, hidden, tokens, parameters, sums)
            total += value
            parts.append(statistics)
        ctx.save_for_backward(hidden_gradient, *gradient_sums)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *(gradient * upstream for gradient in ctx.saved_tensors)


def _add_gradients(
    token_losses: TokenLosses,
    hidden: Tensor,
    tokens: slice,
    parameters: tuple[Tensor, ...],
    sums: tuple[Tensor, ...],
) -> tuple[Tensor, dict[str, Tensor]]:
    """One chunk's loss and statistics. All that is large dies with this frame."""
    part = hidden[tokens].detach().requires_grad_()
    with torch.enable_grad():
        losses, statistics = token_losses(part, tokens)
        value = losses.sum()
    gradients = torch.autograd.grad(value, [part, *parameters], allow_unused=True)
    for gradient_sum, gradient in zip(sums, gradients, strict=True):
        if gradient is not None:  # None: this head leaves the parameter unused
            gradient_sum += gradient
    return value.detach(), statistics


def _sum_dtype(parameter: Tensor) -> torch.dtype:
    """A sum over many chunks takes float32, also where the head is bfloat16."""
    return torch.promote_types(parameter.dtype, torch.float32)
