"""The reference sampler: transformers with continuous batching in a left-padded cache.

All rows share the columns of one key-value cache. A response that joins is prefilled on its own and
its cache padded on the left to the common width; positions are counted by row, so padding changes
nothing. Columns that no row uses any more are cut off. Layers with a sliding window keep all their
columns too, as a cache made without the model's configuration does: only their mask is narrower.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from engine.backends import Decoded, Request
from engine.weights import Weights, load_into


@dataclass
class _Row:
    request: Request
    uniforms: np.ndarray
    emitted: list[int] = field(default_factory=list)


class HFSampler:
    """Samples from a transformers model; see `engine.backends.Sampler`."""

    def __init__(
        self,
        model: Any,
        vocabulary: int,
        stop_ids: Sequence[int],
        temperature: float,
        slots: int,
    ) -> None:
        self.model = model.eval()
        self.vocabulary = vocabulary
        self.stop_ids = frozenset(stop_ids)
        self.temperature = temperature
        self.slots = slots
        self._queue: list[Request] = []
        self._rows: list[_Row] = []
        self._cache = DynamicCache(config=model.config)
        self._mask = torch.zeros(0, 0, dtype=torch.long, device=model.device)  # [rows, columns]

    @property
    def running(self) -> int:
        return len(self._queue) + len(self._rows)

    def add(self, request: Request) -> None:
        self._queue.insert(0 if request.urgent else len(self._queue), request)

    @torch.inference_mode()
    def load(self, weights: Weights, reprefill: bool = False) -> None:
        load_into(self.model, weights)
        if reprefill and self._rows:
            # All but the last token, which the next step puts in.
            texts = [[*row.request.prompt_ids, *row.emitted[:-1]] for row in self._rows]
            self._cache, self._mask, _ = self._prefill(texts)

    @torch.inference_mode()
    def step(self) -> Decoded:
        urgent = sum(request.urgent for request in self._queue)
        free = max(self.slots - len(self._rows), urgent)
        joining, self._queue = self._queue[:free], self._queue[free:]
        if joining:
            rows = [_Row(request, _uniforms(request)) for request in joining]
            logits = self._join(rows)
        else:
            rows = self._rows
            logits = self._decode()
        scaled = logits[:, : self.vocabulary].float() / self.temperature
        logprobs = scaled.log_softmax(-1)
        ids = self._draw(rows, logprobs)
        finished = {}
        for row, token in zip(rows, ids.tolist(), strict=True):
            row.emitted.append(token)
            if token in self.stop_ids:
                finished[row.request.ticket] = "stop"
            elif len(row.emitted) == row.request.max_new_tokens:
                finished[row.request.ticket] = "length"
        decoded = Decoded([row.request.ticket for row in rows], ids, logprobs, finished)
        if finished:
            self._leave(finished)
        return decoded

    def _draw(self, rows: list[_Row], logprobs: Tensor) -> Tensor:
        # Inverse transform with one uniform for each row, in float64: the last id's rounding error
        # of a float32 sum over a large vocabulary would be as large as a rare id.
        cumulative = logprobs.double().exp().cumsum(-1)
        uniforms = [row.uniforms[len(row.emitted)] for row in rows]
        drawn = torch.tensor(uniforms, dtype=torch.float64, device=logprobs.device)
        ids = torch.searchsorted(cumulative, (drawn * cumulative[:, -1])[:, None], right=True)
        ids = ids.squeeze(-1).clamp(max=self.vocabulary - 1)
        greedy = torch.tensor([row.request.greedy for row in rows], device=logprobs.device)
        return torch.where(greedy, logprobs.argmax(-1), ids)

    def _join(self, rows: list[_Row]) -> Tensor:
        """Prefills new rows and appends them to the batch; [new rows, V] logits."""
        cache, mask, logits = self._prefill([row.request.prompt_ids for row in rows])
        width = max(mask.shape[1], self._mask.shape[1])
        merged = DynamicCache()
        for index, new in enumerate(cache.layers):
            keys, values = _widen(new.keys, width), _widen(new.values, width)
            if self._rows:
                old = self._cache.layers[index]
                keys = torch.cat([_widen(old.keys, width), keys])
                values = torch.cat([_widen(old.values, width), values])
            merged.update(keys, values, index)
        masks = [_widen(m[..., None], width)[..., 0] for m in (self._mask, mask)]
        self._mask = torch.cat(masks)
        self._cache = merged
        self._rows = self._rows + rows
        return logits

    def _prefill(self, texts: Sequence[Sequence[int]]) -> tuple[DynamicCache, Tensor, Tensor]:
        """Cache and mask of these texts, padded on the left, and [texts, V] logits behind them."""
        width = max(map(len, texts))
        ids = torch.zeros(len(texts), width, dtype=torch.long)
        mask = torch.zeros(len(texts), width, dtype=torch.long)
        for row, text in enumerate(texts):
            ids[row, width - len(text) :] = torch.tensor(text)
            mask[row, width - len(text) :] = 1
        ids, mask = ids.to(self.model.device), mask.to(self.model.device)
        cache = DynamicCache()
        logits = self._forward(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0), cache)
        return cache, mask, logits

    def _decode(self) -> Tensor:
        """Advances all rows by the token each emitted last; [rows, V] logits."""
        positions = self._mask.sum(-1, keepdim=True)
        self._mask = pad(self._mask, (0, 1), value=1)
        last = torch.tensor([row.emitted[-1:] for row in self._rows], device=self.model.device)
        return self._forward(last, self._mask, positions, self._cache)

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _leave(self, finished: dict[int, str]) -> None:
        """Takes finished rows out, and columns that no other row uses."""
        kept = [i for i, row in enumerate(self._rows) if row.request.ticket not in finished]
        self._rows = [self._rows[i] for i in kept]
        if not kept:
            self._cache = DynamicCache()
            self._mask = self._mask[:0, :0]
            return
        index = torch.tensor(kept, device=self.model.device)
        self._mask = self._mask[index]
        unused = int(self._mask.argmax(-1).min())
        self._mask = self._mask[:, unused:]
        smaller = DynamicCache()
        for i, layer in enumerate(self._cache.layers):
            smaller.update(layer.keys[index, :, unused:], layer.values[index, :, unused:], i)
        self._cache = smaller


def _uniforms(request: Request) -> np.ndarray:
    return np.random.default_rng(request.seed).random(request.max_new_tokens)


def _widen(tensor: Tensor, width: int) -> Tensor:
    """Pads the second-last axis, the cache's columns, on the left."""
    return pad(tensor, (0, 0, width - tensor.shape[-2], 0))
