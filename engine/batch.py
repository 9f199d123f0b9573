"""The border from Arrow to torch: ragged rows in, the tensors of a micro-batch out.

Row t of a cache belongs to the distribution that produced response token t. In a sequence
`prompt + response` of which the prompt is P long, that is the model's output at position P + t − 1.
This shift is made here, once (`_sequences`), for learner and teacher alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from engine.config import Cache, Dense, TeacherHidden, chosen_by_teacher
from engine.schema import CACHED
from engine.support import Support

# What a forward pass costs by itself, in padded tokens: the larger, the fewer and wider the passes.
PASS_TOKENS = 256


@dataclass(frozen=True)
class Ragged:
    """Lists of different lengths: list i is values[offsets[i]:offsets[i + 1]]."""

    values: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, lists: pa.ListArray) -> "Ragged":
        """A view of an Arrow list array; a slice of a larger array too."""
        offsets = lists.offsets.to_numpy()
        return cls(lists.flatten().to_numpy(zero_copy_only=False), offsets - offsets[0])

    @classmethod
    def nested(cls, lists: pa.ListArray) -> "Ragged":
        """The inner lists of a list of lists."""
        return cls.of(lists.flatten())

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def positions(self, rows: np.ndarray) -> np.ndarray:
        """Where the values of these lists lie, list by list."""
        lengths = self.lengths[rows]
        starts = np.repeat(self.offsets[rows], lengths)
        before = np.repeat(np.cumsum(lengths) - lengths, lengths)
        return np.asarray(starts + np.arange(lengths.sum()) - before)

    def take(self, rows: np.ndarray) -> "Ragged":
        """These lists, copied."""
        return Ragged(self.values[self.positions(rows)], _offsets(self.lengths[rows]))


@dataclass(frozen=True)
class Sequences:
    """Prompts and responses as padded model input; B rows of at most L tokens."""

    input_ids: Tensor
    """[B, L] int64, padded on the right."""
    attention_mask: Tensor
    """[B, L] int64."""
    sources: Tensor
    """[n] int64: in the flattened [B * L], the position whose output is the distribution of each
    response token."""

    def to(self, device: torch.device) -> "Sequences":
        return Sequences(
            self.input_ids.to(device), self.attention_mask.to(device), self.sources.to(device)
        )


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass works on: n counted tokens of B rows."""

    sequences: Sequences
    support: Support
    fresh: Tensor
    """[n] bool: of age 0, in a response that no weight swap went through. After a swap the sampler
    goes on with keys and values of older weights, so only here must the ratio be 1."""
    ages: Tensor
    """[n] int64, in steps."""
    entries: np.ndarray
    """Where the support's entries lie among those of the whole step."""


class StepBatch:
    """The rows of a step, flat in memory, with the age bound applied."""

    def __init__(
        self, batch: pa.RecordBatch, cache: Cache, version: int, max_age: int, vocabulary: int
    ) -> None:
        """`batch` is SCORED. `version` is the learner's; tokens older than `max_age` don't count.
        This is where the bound is enforced, whatever the driver let through."""
        self._prompts = Ragged.of(batch["prompt_ids"])
        self._responses = Ragged.of(batch["response_ids"])
        self._sampler_logprobs = Ragged.of(batch["sampler_logprobs"]).values
        self._entries = Ragged.nested(batch["teacher_logprobs"])
        self._columns = {"teacher_logprobs": self._entries.values} | _cached(batch, cache)
        if isinstance(cache, Dense) and np.any(self._entries.lengths != vocabulary):
            raise ValueError(f"a dense cache must have all {vocabulary} ids at each token")
        self._hidden = _matrix(Ragged.nested(batch["teacher_hidden"]))
        if isinstance(cache, TeacherHidden) and self._hidden.shape[1] == 0 and len(self._hidden):
            raise ValueError("a cache of the teacher's hidden states has none at its tokens")
        self.cached_bytes = sum(batch[name].flatten().flatten().nbytes for name in CACHED)
        self.ages = version - token_versions(batch)
        self.counted = self.ages <= max_age
        whole = Ragged.of(batch["version_runs"]).lengths == 1
        self._fresh = (self.ages == 0) & np.repeat(whole, self._responses.lengths)

    @property
    def rows(self) -> np.ndarray:
        return np.arange(len(self._responses.lengths))

    @property
    def lengths(self) -> np.ndarray:
        """[rows] response tokens."""
        return self._responses.lengths

    @property
    def entries(self) -> int:
        """Cached entries of all tokens."""
        return len(self._entries.values)

    def counted_tokens(self, rows: np.ndarray) -> int:
        return int(self.counted[self._responses.positions(rows)].sum())

    def split(self, rows: np.ndarray, budget: int) -> list[np.ndarray]:
        """These rows in groups of at most `budget` padded tokens."""
        return split(self._prompts.lengths + self._responses.lengths, rows, budget)

    def micro(self, rows: np.ndarray, device: torch.device) -> MicroBatch:
        """These rows as tensors."""
        prompts, responses = self._prompts.take(rows), self._responses.take(rows)
        tokens = self._responses.positions(rows)
        counted = self.counted[tokens]
        tokens = tokens[counted]
        entries = self._entries.positions(tokens)
        columns = {"sampler_logprobs": torch.zeros(0, device=device)} | {
            name: torch.from_numpy(column[entries] if len(column) else column.copy()).to(device)
            for name, column in self._columns.items()
        }
        support = Support(
            offsets=torch.from_numpy(_offsets(self._entries.lengths[tokens])),
            token_ids=_long(responses.values[counted]).to(device),
            token_sampler_logprobs=_float(self._sampler_logprobs[tokens]).to(device),
            teacher_hidden=self._states(tokens).to(device),
            **columns,
        )
        sequences = _sequences(prompts, responses, counted).to(device)
        return MicroBatch(
            sequences,
            support,
            torch.from_numpy(self._fresh[tokens]),
            torch.from_numpy(self.ages[tokens]),
            entries,
        )

    def _states(self, tokens: np.ndarray) -> Tensor:
        if self._hidden.shape[1] == 0:
            return torch.zeros(0)
        return torch.from_numpy(self._hidden[tokens])

    def set_proximal(self, logprobs: np.ndarray) -> None:
        """log p of every entry at the step's start, for stabilisers that compare with it."""
        self._columns["proximal_logprobs"] = logprobs


def token_versions(batch: pa.RecordBatch) -> np.ndarray:
    """Policy version of each response token of a ROLLOUT batch, flat, [tokens]."""
    runs = batch["version_runs"].flatten()
    return np.repeat(runs.field("version").to_numpy(), runs.field("length").to_numpy())


def sequences(batch: pa.RecordBatch, rows: np.ndarray) -> Sequences:
    """These rows of a ROLLOUT batch as model input; every response token has its source."""
    prompts = Ragged.of(batch["prompt_ids"]).take(rows)
    responses = Ragged.of(batch["response_ids"]).take(rows)
    return _sequences(prompts, responses, np.ones(len(responses.values), bool))


def split(lengths: np.ndarray, rows: np.ndarray, budget: int) -> list[np.ndarray]:
    """Rows in groups of at most `budget` padded tokens; a longer row is a group of its own.

    Of all splits of the rows in order of length, the one with the least padded tokens, counting
    PASS_TOKENS for each group: one long response doesn't pad all the others to its length."""
    ordered = rows[np.argsort(-lengths[rows], kind="stable")]
    longest = lengths[ordered].tolist()
    best = [0.0] + [float("inf")] * len(ordered)  # cost of the first i rows
    start = [0] * (len(ordered) + 1)
    for first, length in enumerate(longest):
        for last in range(first + 1, min(len(ordered), first + max(1, budget // length)) + 1):
            cost = best[first] + PASS_TOKENS + length * (last - first)
            if cost < best[last]:
                best[last], start[last] = cost, first
    groups: list[np.ndarray] = []
    last = len(ordered)
    while last:
        groups.append(ordered[start[last] : last])
        last = start[last]
    return groups


def merge(batches: Sequence[pa.RecordBatch], rows: Sequence[Sequence[int]]) -> pa.RecordBatch:
    """One batch of the given rows of each batch."""
    taken = [b.take(pa.array(r, pa.int32())) for b, r in zip(batches, rows, strict=True)]
    return pa.concat_batches(taken)


def _cached(batch: pa.RecordBatch, cache: Cache) -> dict[str, np.ndarray]:
    """Columns of the cache's entries, beside the teacher's scores; empty where there are none."""
    by_teacher = chosen_by_teacher(cache)
    who = "teacher" if by_teacher else "cache"
    ids = Ragged.nested(batch[f"{who}_ids"]).values  # none of a dense cache, for it holds them all
    draws = Ragged.nested(batch[f"{who}_draws"]).values
    columns = {"ids": ids.astype(np.int64), "draws": draws.astype(np.int64)}
    if not by_teacher:
        columns["sampler_logprobs"] = Ragged.nested(batch["cache_logprobs"]).values
    return columns


def _sequences(prompts: Ragged, responses: Ragged, counted: np.ndarray) -> Sequences:
    lengths = prompts.lengths + responses.lengths
    width = int(lengths.max())
    ids = np.zeros((len(lengths), width), np.int64)
    columns = np.arange(width)
    in_prompt = columns < prompts.lengths[:, None]
    present = columns < lengths[:, None]
    ids[in_prompt] = prompts.values
    ids[present & ~in_prompt] = responses.values
    # The one shift: token t of a response is predicted at position P + t - 1.
    first = np.arange(len(lengths)) * width + prompts.lengths - 1
    before = np.repeat(responses.offsets[:-1], responses.lengths)
    sources = np.repeat(first, responses.lengths) + np.arange(len(responses.values)) - before
    return Sequences(
        torch.from_numpy(ids),
        torch.from_numpy(present.astype(np.int64)),
        torch.from_numpy(sources[counted]),
    )


def _matrix(lists: Ragged) -> np.ndarray:
    """Lists of one length as rows."""
    width = int(lists.lengths.max(initial=0))
    return lists.values.reshape(len(lists.lengths), width)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _long(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))


def _float(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))
