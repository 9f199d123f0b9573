"""The Arrow schema of a rollout batch: PROMPT ⊂ ROLLOUT ⊂ SCORED.

Stages only add columns; none renames or overwrites one. Token ids go in and out as ids, int32, in
ragged lists. Columns per token have one entry for each response token; columns per kept id
(`cache_*`, `teacher_*`) are lists of lists: for each response token, the ids that are cached.

A rollout's identity is (`ticket`, `attempt`): the ticket is its position in the stream of prompts,
the attempt counts how often that position was queued again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

PER_TOKEN_IDS = pa.list_(pa.list_(pa.int32()))
PER_TOKEN_COUNTS = pa.list_(pa.list_(pa.uint16()))
PER_TOKEN_LOGPROBS = pa.list_(pa.list_(pa.float32()))
PER_TOKEN_STATES = pa.list_(pa.large_list(pa.float16()))  # a step's may be more than 2^31 numbers
VERSION_RUNS = pa.list_(pa.struct([("version", pa.int32()), ("length", pa.int32())]))

PROMPT = pa.schema(
    [
        ("ticket", pa.int64()),
        ("attempt", pa.int32()),
        ("prompt_id", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("answer", pa.string()),  # null: nothing to verify
        ("verifier", pa.string()),
    ]
)
ROLLOUT = pa.schema(
    [
        *PROMPT,
        ("response_ids", pa.list_(pa.int32())),
        ("sampler_logprobs", pa.list_(pa.float32())),  # log p_old of each response token
        ("version_runs", VERSION_RUNS),  # policy version of each token, run-length encoded
        ("finish_reason", pa.string()),  # "stop" (end of sequence) or "length"
        ("correct", pa.bool_()),  # the verifier's word; null without an answer
        ("cache_ids", PER_TOKEN_IDS),  # ids that the sampler chose; empty where it chooses none
        ("cache_logprobs", PER_TOKEN_LOGPROBS),  # log p_old at cache_ids
        ("cache_draws", PER_TOKEN_COUNTS),  # how often each was drawn; empty where none is counted
    ]
)
SCORED = pa.schema(
    [
        *ROLLOUT,
        ("teacher_ids", PER_TOKEN_IDS),  # ids that the teacher chose; empty where it chooses none
        ("teacher_logprobs", PER_TOKEN_LOGPROBS),  # log q at the cached ids, or at all ids
        ("teacher_draws", PER_TOKEN_COUNTS),  # as cache_draws, of teacher_ids
        ("teacher_hidden", PER_TOKEN_STATES),  # last hidden state; empty where scores are cached
        ("teacher", pa.string()),  # digest of the teacher that scored
    ]
)
CACHED = (
    "cache_ids",
    "cache_logprobs",
    "cache_draws",
    "teacher_ids",
    "teacher_logprobs",
    "teacher_draws",
    "teacher_hidden",
)
PER_TOKEN = ("sampler_logprobs", *CACHED)


class SchemaError(ValueError):
    """A batch doesn't hold what its stage promises."""


def validate(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Checks a batch at the end of a stage: columns, types, and one entry for each token."""
    if not batch.schema.equals(schema):
        raise SchemaError(f"batch has columns\n{batch.schema}\nbut the stage promises\n{schema}")
    if "response_ids" not in schema.names:
        return batch
    tokens = row_lengths(batch, "response_ids")
    for name in PER_TOKEN:
        if name in schema.names and not np.array_equal(row_lengths(batch, name), tokens):
            raise SchemaError(f"column {name} doesn't have one entry for each response token")
    runs = batch.column("version_runs").flatten().field("length").to_numpy()
    ends = np.concatenate([[0], np.cumsum(row_lengths(batch, "version_runs"))])
    covered = np.diff(np.concatenate([[0], np.cumsum(runs)])[ends])
    if not np.array_equal(covered, tokens):
        raise SchemaError("version_runs don't cover the response tokens")
    return batch


def row_lengths(batch: pa.RecordBatch, name: str) -> np.ndarray:
    """Lengths of a list column's rows, [rows]."""
    return np.diff(batch.column(name).offsets.to_numpy())


def ragged(values: np.ndarray, lengths: Sequence[int] | np.ndarray) -> pa.ListArray:
    """A list array from flat values and the length of each list."""
    return nest(pa.array(values), lengths)


def states(hidden: np.ndarray) -> pa.LargeListArray:
    """A list array from the rows of a matrix [n, D] of float16."""
    ends = np.arange(len(hidden) + 1) * hidden.shape[1]
    return pa.LargeListArray.from_arrays(pa.array(ends), pa.array(hidden.reshape(-1)))


def nest(values: pa.Array, lengths: Sequence[int] | np.ndarray) -> pa.ListArray:
    """One more level of lists around an array."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), values)


def empty_lists(lengths: Sequence[int] | np.ndarray, dtype: type[np.generic]) -> pa.ListArray:
    """A column of lists of empty lists: nothing is cached at any token."""
    inner = ragged(np.zeros(0, dtype), np.zeros(int(np.sum(lengths)), np.int32))
    return nest(inner, lengths)


def extend(batch: pa.RecordBatch, schema: pa.Schema, columns: list[pa.Array]) -> pa.RecordBatch:
    """The batch of the next stage: the given batch's columns and the new ones, validated."""
    arrays = [*batch.columns, *columns]
    return validate(pa.RecordBatch.from_arrays(arrays, schema=schema), schema)


@dataclass(frozen=True)
class RolloutMeta:
    """What the driver knows of a rollout: everything but its tokens."""

    ticket: int
    attempt: int
    row: int
    """Position in the batch that holds it."""
    prompt_tokens: int
    response_tokens: int
    oldest_version: int
    newest_version: int
    finish_reason: str
    correct: bool | None

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens


def describe(batch: pa.RecordBatch) -> list[RolloutMeta]:
    """The metadata of each row of a ROLLOUT or SCORED batch."""
    versions = [[run["version"] for run in runs] for runs in batch["version_runs"].to_pylist()]
    return [
        RolloutMeta(ticket, attempt, row, int(prompt), int(response), min(runs), max(runs), why, ok)
        for row, (ticket, attempt, prompt, response, runs, why, ok) in enumerate(
            zip(
                batch["ticket"].to_pylist(),
                batch["attempt"].to_pylist(),
                row_lengths(batch, "prompt_ids"),
                row_lengths(batch, "response_ids"),
                versions,
                batch["finish_reason"].to_pylist(),
                batch["correct"].to_pylist(),
                strict=True,
            )
        )
    ]
