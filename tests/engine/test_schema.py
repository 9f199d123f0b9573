"""The Arrow schema: stages only add columns, and validate() holds them to it."""

import numpy as np
import pyarrow as pa
import pytest

from engine.prompts import to_batch
from engine.schema import (
    PROMPT,
    ROLLOUT,
    SCORED,
    RolloutMeta,
    SchemaError,
    describe,
    empty_lists,
    extend,
    nest,
    ragged,
    row_lengths,
    validate,
)
from tests.engine.fakes import no_states, prompts, rollout_batch, scored_batch


def rollouts() -> pa.RecordBatch:
    """Prompts of 1, 2 and 3 tokens; responses of 3, 1 and 2."""
    batch = to_batch(prompts(3), [7, 8, 9], [0, 2, 1])
    return rollout_batch(batch, [[1, 1, 2], [4], [5, 3]])


def replaced(batch: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    """The batch with another column under this name, unchecked."""
    columns = [column if n == name else batch[n] for n in batch.schema.names]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def test_each_stage_adds_columns_behind_those_of_the_stage_before():
    assert list(ROLLOUT)[: len(PROMPT)] == list(PROMPT)
    assert list(SCORED)[: len(ROLLOUT)] == list(ROLLOUT)
    batch = rollouts()
    scored = scored_batch(batch)
    assert scored.select(ROLLOUT.names).equals(batch)


def test_whole_batches_pass_and_come_back_themselves():
    batch = rollouts()
    assert validate(batch, ROLLOUT) is batch
    scored = scored_batch(batch)
    assert validate(scored, SCORED) is scored
    assert validate(scored.slice(1, 2), SCORED).num_rows == 2
    assert validate(pa.RecordBatch.from_pylist([], SCORED), SCORED).num_rows == 0


def test_a_batch_of_another_stage_is_refused():
    with pytest.raises(SchemaError, match="but the stage promises"):
        validate(rollouts(), SCORED)
    with pytest.raises(SchemaError, match="but the stage promises"):
        validate(rollouts(), PROMPT)


def test_a_column_of_another_type_or_name_is_refused():
    batch = rollouts()
    wide = replaced(batch, "ticket", batch["ticket"].cast(pa.int32()))
    with pytest.raises(SchemaError, match="ticket: int32"):
        validate(wide, ROLLOUT)
    renamed = batch.rename_columns(
        ["tickets" if name == "ticket" else name for name in batch.schema.names]
    )
    with pytest.raises(SchemaError, match="tickets: int64"):
        validate(renamed, ROLLOUT)


# Responses are of 3, 1 and 2 tokens. In total the wrong lengths are 6 as well.
WRONG = [3, 2, 1]


@pytest.mark.parametrize("name", ["sampler_logprobs", "cache_ids", "cache_logprobs", "cache_draws"])
def test_a_rollout_column_without_one_entry_for_each_token_is_refused(name):
    batch = rollouts()
    column = {
        "sampler_logprobs": ragged(np.zeros(6, np.float32), WRONG),
        "cache_ids": empty_lists(WRONG, np.int32),
        "cache_logprobs": empty_lists(WRONG, np.float32),
        "cache_draws": empty_lists(WRONG, np.uint16),
    }[name]
    with pytest.raises(SchemaError, match=f"column {name} doesn't have one entry"):
        validate(replaced(batch, name, column), ROLLOUT)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("teacher_ids", np.int32),
        ("teacher_logprobs", np.float32),
        ("teacher_draws", np.uint16),
        ("teacher_hidden", None),
    ],
)
def test_a_teacher_column_without_one_entry_for_each_token_is_refused(name, dtype):
    column = empty_lists(WRONG, dtype) if dtype else no_states(WRONG)
    with pytest.raises(SchemaError, match=f"column {name} doesn't have one entry"):
        validate(replaced(scored_batch(rollouts()), name, column), SCORED)


@pytest.mark.parametrize(
    "lengths",
    [
        [[3], [1], [1]],  # one token has no version
        [[3], [2], [1]],  # the last token of a row would get its version from another row
        [[3], [], [3]],
        [[2, 2], [1], [1]],
    ],
)
def test_version_runs_must_cover_the_tokens_of_each_row(lengths):
    runs = [[{"version": 1, "length": length} for length in row] for row in lengths]
    column = pa.array(runs, ROLLOUT.field("version_runs").type)
    with pytest.raises(SchemaError, match="version_runs don't cover"):
        validate(replaced(rollouts(), "version_runs", column), ROLLOUT)


def test_extend_validates_what_it_makes():
    batch = rollouts()
    with pytest.raises(SchemaError, match="teacher_logprobs"):
        extend(
            batch,
            SCORED,
            [
                empty_lists([3, 1, 2], np.int32),
                empty_lists(WRONG, np.float32),
                empty_lists([3, 1, 2], np.uint16),
                no_states([3, 1, 2]),
                pa.array(["t"] * 3, pa.string()),
            ],
        )


def test_metadata_describe_each_row_and_hold_no_tokens():
    assert describe(rollouts()) == [
        RolloutMeta(7, 0, 0, 1, 3, 1, 2, "stop", None),
        RolloutMeta(8, 2, 1, 2, 1, 4, 4, "stop", None),
        RolloutMeta(9, 1, 2, 3, 2, 3, 5, "stop", None),
    ]
    assert [meta.tokens for meta in describe(rollouts())] == [4, 3, 5]
    assert describe(scored_batch(rollouts())) == describe(rollouts())


def test_metadata_of_a_slice_count_its_own_rows():
    metas = describe(rollouts().slice(1, 2))
    assert [(meta.ticket, meta.row) for meta in metas] == [(8, 0), (9, 1)]
    assert [(meta.prompt_tokens, meta.response_tokens) for meta in metas] == [(2, 1), (3, 2)]
    assert [(meta.oldest_version, meta.newest_version) for meta in metas] == [(4, 4), (3, 5)]


def test_lists_are_built_from_flat_values_and_lengths():
    inner = ragged(np.array([1, 2, 3, 4], np.int32), [1, 0, 3])
    assert inner.to_pylist() == [[1], [], [2, 3, 4]]
    outer = nest(inner, [2, 0, 1])
    assert outer.to_pylist() == [[[1], []], [], [[2, 3, 4]]]
    assert empty_lists([2, 0, 1], np.float32).to_pylist() == [[[], []], [], [[]]]


def test_lengths_of_a_sliced_column_are_those_of_its_rows():
    assert row_lengths(rollouts(), "response_ids").tolist() == [3, 1, 2]
    assert row_lengths(rollouts().slice(1), "response_ids").tolist() == [1, 2]
