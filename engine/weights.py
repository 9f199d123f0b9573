"""Weights on their way from the learner to the rollout workers.

`publish` packs a model's tensors into one contiguous buffer per type, which crosses processes as
one read-only object; `tensors` views them on the other side without a copy. A version is the number
of steps that the learner has published.
"""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.canary import Canary
from engine.names import WeightsMismatchError, fill


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies in its buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """First byte."""


@dataclass(frozen=True)
class Weights:
    """One published version of the student."""

    version: int
    entries: tuple[Entry, ...]
    buffers: dict[torch.dtype, np.ndarray]
    """Raw bytes for each type."""
    canary: Canary | None = None
    """What a sampler must say under them."""

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def check_type(self, dtype: torch.dtype) -> None:
        """Raises WeightsMismatchError if a floating-point tensor is of another type than this."""
        others = [e.name for e in self.entries if e.dtype.is_floating_point and e.dtype != dtype]
        if others:
            raise WeightsMismatchError(
                f"weights of version {self.version} should be {dtype}, but {len(others)} tensors "
                f"are not: {', '.join(others[:4])}"
            )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, view) of each tensor. The views are read-only: copy from them, never write."""
        with warnings.catch_warnings():
            # torch warns of read-only memory once; every reader copies out of these views.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            flat = {dtype: torch.from_numpy(buffer) for dtype, buffer in self.buffers.items()}
        for entry in self.entries:
            count = entry.dtype.itemsize * int(np.prod(entry.shape))
            raw = flat[entry.dtype][entry.start : entry.start + count]
            yield entry.name, raw.view(entry.dtype).view(entry.shape)


def publish(
    named: Iterable[tuple[str, Tensor]],
    version: int,
    dtype: torch.dtype,
    canary: Canary | None = None,
) -> Weights:
    """Packs tensors; floating-point ones are converted to `dtype`."""
    entries: list[Entry] = []
    parts: dict[torch.dtype, list[Tensor]] = {}
    sizes: dict[torch.dtype, int] = {}
    for name, tensor in named:
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        raw = tensor.detach().to("cpu", kind).contiguous().view(-1).view(torch.uint8)
        start = sizes.get(kind, 0)
        entries.append(Entry(name, kind, tuple(tensor.shape), start))
        parts.setdefault(kind, []).append(raw)
        sizes[kind] = start + raw.numel()
    buffers = {kind: torch.cat(raws).numpy() for kind, raws in parts.items()}
    return Weights(version, tuple(entries), buffers, canary)


def load_into(model: Any, weights: Weights) -> None:
    """Copies published weights into a transformers model of the same architecture and type."""
    weights.check_type(model.dtype)
    fill(model, dict(weights.tensors()))
