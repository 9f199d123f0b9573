"""From Arrow to torch, by hand-computed positions: the shift, ragged rows, masks, slices.

The arithmetic of most tests: a prompt of P tokens starts at column 0, and response token t of it is
predicted by the output at column P + t - 1.
"""

import itertools

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import PASS_TOKENS, Ragged, StepBatch, merge, sequences, split, token_versions
from engine.config import (
    Dense,
    MultiSample,
    Poisson,
    Sampled,
    TeacherHidden,
    TeacherMultiSample,
    TeacherTopK,
)
from engine.prompts import Prompt, to_batch
from engine.schema import ROLLOUT, SCORED, VERSION_RUNS, empty_lists, extend, nest, ragged, states
from tests.engine.fakes import no_states, rollout_batch, scored_batch

CPU = torch.device("cpu")
ANY_AGE = 10**6


def prompt(*ids: int) -> Prompt:
    return Prompt("p", "text", ids, None, "exact")


def sampled_batch() -> pa.RecordBatch:
    """Three rows with prompts of 2, 1 and 3 tokens, and responses of 3, 1 and 2.

    Response ids are 10, 11, 12; 20; 30, 31. Versions: 4 4 5; 5; 3 5."""
    batch = to_batch([prompt(1, 2), prompt(3), prompt(4, 5, 6)], [1, 2, 3], [0, 0, 0])
    return scored_batch(rollout_batch(batch, [[4, 4, 5], [5], [3, 5]]))


# Kept ids of each of the six response tokens: as many as 2 0 1; 3; 0 1.
KEPT = [[[70, 71], [], [72]], [[73, 74, 75]], [[], [76]]]
VOCABULARY = 4


def scored(
    ids, logprobs, teacher_ids, teacher_logprobs, draws=None, teacher_draws=None, hidden=None
) -> pa.RecordBatch:
    uncounted = empty_lists([3, 1, 2], np.uint16)
    batch = sampled_batch().select(ROLLOUT.names)
    columns = [batch[name] for name in ROLLOUT.names[:-3]]
    cached = pa.RecordBatch.from_arrays(
        [*columns, ids, logprobs, draws or uncounted], schema=ROLLOUT
    )
    teacher = pa.array(["t"] * 3, pa.string())
    hidden = hidden or no_states([3, 1, 2])
    draws = teacher_draws or uncounted
    return extend(cached, SCORED, [teacher_ids, teacher_logprobs, draws, hidden, teacher])


def lists(values, dtype) -> pa.ListArray:
    return pa.array(values, pa.list_(pa.list_(dtype)))


def kept_logprobs(offset: float):
    """Log-probability -id/100 - offset of each kept id."""
    return lists([[[-i / 100 - offset for i in t] for t in row] for row in KEPT], pa.float32())


def kept_draws():
    """Id 70 + i was drawn i + 1 times."""
    return lists([[[i - 69 for i in t] for t in row] for row in KEPT], pa.uint16())


def poisson_batch() -> pa.RecordBatch:
    nothing = empty_lists([3, 1, 2], np.int32)
    return scored(lists(KEPT, pa.int32()), kept_logprobs(0), nothing, kept_logprobs(1))


def multi_sample_batch() -> pa.RecordBatch:
    nothing = empty_lists([3, 1, 2], np.int32)
    return scored(
        lists(KEPT, pa.int32()), kept_logprobs(0), nothing, kept_logprobs(1), draws=kept_draws()
    )


def top_k_batch() -> pa.RecordBatch:
    no_ids, no_logprobs = empty_lists([3, 1, 2], np.int32), empty_lists([3, 1, 2], np.float32)
    return scored(no_ids, no_logprobs, lists(KEPT, pa.int32()), kept_logprobs(1))


def teacher_draws_batch() -> pa.RecordBatch:
    no_ids, no_logprobs = empty_lists([3, 1, 2], np.int32), empty_lists([3, 1, 2], np.float32)
    ids = lists(KEPT, pa.int32())
    return scored(no_ids, no_logprobs, ids, kept_logprobs(1), teacher_draws=kept_draws())


def dense_scores(vocabulary: int = VOCABULARY) -> pa.ListArray:
    values = -np.arange(6 * vocabulary, dtype=np.float32)
    return nest(ragged(values, [vocabulary] * 6), [3, 1, 2])


def dense_batch(vocabulary: int = VOCABULARY) -> pa.RecordBatch:
    no_ids, no_logprobs = empty_lists([3, 1, 2], np.int32), empty_lists([3, 1, 2], np.float32)
    return scored(no_ids, no_logprobs, no_ids, dense_scores(vocabulary))


def hidden_batch() -> pa.RecordBatch:
    """Token i has the hidden state (i, i + 0.25, i + 0.5)."""
    no_ids, no_logprobs = empty_lists([3, 1, 2], np.int32), empty_lists([3, 1, 2], np.float32)
    values = (np.arange(6)[:, None] + [0, 0.25, 0.5]).astype(np.float16)
    return scored(no_ids, no_logprobs, no_ids, no_logprobs, hidden=nest(states(values), [3, 1, 2]))


CASES = {
    "sampled": (sampled_batch, Sampled()),
    "poisson": (poisson_batch, Poisson()),
    "multi_sample": (multi_sample_batch, MultiSample()),
    "teacher_top_k": (top_k_batch, TeacherTopK()),
    "teacher_multi_sample": (teacher_draws_batch, TeacherMultiSample()),
    "dense": (dense_batch, Dense()),
    "teacher_hidden": (hidden_batch, TeacherHidden()),
}
each_cache = pytest.mark.parametrize("case", CASES)


def micro(batch, cache, rows, version=5, max_age=ANY_AGE):
    step = StepBatch(batch, cache, version, max_age, VOCABULARY)
    return step.micro(np.array(rows), CPU)


def assert_equal(one, other) -> None:
    """All tensors of two micro-batches."""
    for a, b in ((one.sequences, other.sequences), (one.support, other.support)):
        for name, value in vars(a).items():
            assert torch.equal(value, vars(b)[name]), name
    assert torch.equal(one.fresh, other.fresh)
    assert torch.equal(one.ages, other.ages)


# The shift


def test_a_response_token_belongs_to_the_output_one_position_before_it():
    given = sequences(sampled_batch(), np.arange(3))
    assert given.input_ids.tolist() == [
        [1, 2, 10, 11, 12],
        [3, 20, 0, 0, 0],
        [4, 5, 6, 30, 31],
    ]
    assert given.attention_mask.tolist() == [
        [1, 1, 1, 1, 1],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1],
    ]
    # Row i starts at 5 i. Tokens 10, 11, 12 stand at columns 2, 3, 4 and so are predicted at
    # 1, 2, 3; 20 stands at 5 + 1; 30 and 31 at 10 + 3 and 10 + 4.
    assert given.sources.tolist() == [1, 2, 3, 5, 12, 13]


@each_cache
def test_each_row_of_the_cache_belongs_to_the_distribution_that_made_its_token(case):
    batch, cache = CASES[case][0](), CASES[case][1]
    step = micro(batch, cache, [0, 1, 2])
    after = step.sequences.input_ids.reshape(-1)[step.sequences.sources + 1]
    assert after.tolist() == step.support.token_ids.tolist() == [10, 11, 12, 20, 30, 31]
    # Log-probability of token t is -t / 8.
    expected = [0, -0.125, -0.25, 0, 0, -0.125]
    assert step.support.token_sampler_logprobs.tolist() == expected


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=6
    ),
    st.data(),
)
def test_the_shift_holds_for_any_lengths_any_rows_and_any_mask(shapes, data):
    batch = to_batch(
        [prompt(*range(100, 100 + size)) for size, _, _ in shapes],
        range(1, len(shapes) + 1),
        [0] * len(shapes),
    )
    versions = [[first + t // 2 for t in range(size)] for _, size, first in shapes]
    rows = data.draw(st.permutations(range(len(shapes))))[: data.draw(st.integers(1, len(shapes)))]
    max_age = data.draw(st.integers(0, 6))
    step = micro(scored_batch(rollout_batch(batch, versions)), Sampled(), rows, 5, max_age)
    # Response token t of ticket n has the id 10 n + t.
    expected = [
        10 * (row + 1) + t
        for row in rows
        for t, version in enumerate(versions[row])
        if 5 - version <= max_age
    ]
    assert step.support.token_ids.tolist() == expected
    ids = step.sequences.input_ids
    assert ids.reshape(-1)[step.sequences.sources + 1].tolist() == expected
    width = ids.shape[1]
    for source, token in zip(step.sequences.sources.tolist(), expected, strict=True):
        assert ids[source // width, 0] == 100, "in a row that starts with its prompt"
        assert list(rows)[source // width] == token // 10 - 1, "in the token's own row"


# What is in a cache


def test_a_sampled_cache_holds_the_emitted_tokens():
    support = micro(sampled_batch(), Sampled(), [0, 2]).support
    assert support.offsets.tolist() == [0, 1, 2, 3, 4, 5]
    assert support.ids.tolist() == support.token_ids.tolist() == [10, 11, 12, 30, 31]
    assert support.sampler_logprobs.tolist() == support.token_sampler_logprobs.tolist()
    assert support.teacher_logprobs.tolist() == [-0.5, -0.625, -0.75, -0.5, -0.625]


def test_a_poisson_cache_holds_the_kept_ids_of_each_token_some_none():
    support = micro(poisson_batch(), Poisson(), [2, 0]).support
    # Row 2 keeps none and one id; row 0 two, none and one.
    assert support.offsets.tolist() == [0, 0, 1, 3, 3, 4]
    assert support.ids.tolist() == [76, 70, 71, 72]
    torch.testing.assert_close(support.sampler_logprobs, -support.ids / 100)
    torch.testing.assert_close(support.teacher_logprobs, -support.ids / 100 - 1)


def test_a_poisson_cache_without_any_id_is_whole():
    nothing = empty_lists([3, 1, 2], np.int32), empty_lists([3, 1, 2], np.float32)
    batch = scored(*nothing, *nothing)
    support = micro(batch, Poisson(), [0, 1, 2]).support
    assert support.offsets.tolist() == [0] * 7
    assert len(support.ids) == len(support.sampler_logprobs) == len(support.teacher_logprobs) == 0


def test_the_teachers_ids_are_taken_where_the_teacher_chose():
    support = micro(top_k_batch(), TeacherTopK(), [1, 0]).support
    assert support.offsets.tolist() == [0, 3, 5, 5, 6]
    assert support.ids.tolist() == [73, 74, 75, 70, 71, 72]
    torch.testing.assert_close(support.teacher_logprobs, -support.ids / 100 - 1)
    assert len(support.sampler_logprobs) == 0


def test_a_dense_cache_holds_the_vocabulary_and_no_ids():
    support = micro(dense_batch(), Dense(), [2, 1]).support
    assert support.offsets.tolist() == [0, 4, 8, 12]
    # Tokens 4 and 5, then token 3, of values 0, -1, -2, ... four for each.
    assert support.teacher_logprobs.tolist() == [*range(-16, -24, -1), *range(-12, -16, -1)]
    assert len(support.ids) == len(support.sampler_logprobs) == 0


def test_hidden_states_stay_with_their_tokens():
    support = micro(hidden_batch(), TeacherHidden(), [2, 1]).support
    assert support.teacher_hidden[:, 0].tolist() == [4, 5, 3]
    assert support.teacher_hidden[0].tolist() == [4, 4.25, 4.5]
    assert support.offsets.tolist() == [0, 0, 0, 0]
    # Tokens 2 and 4, of ages 0 and 2 at version 5, less those beyond the bound.
    support = micro(hidden_batch(), TeacherHidden(), [0, 2], max_age=0).support
    assert support.teacher_hidden[:, 0].tolist() == [2, 5]


def test_a_cache_of_hidden_states_without_them_is_refused():
    with pytest.raises(ValueError, match="has none"):
        StepBatch(poisson_batch(), TeacherHidden(), 5, ANY_AGE, VOCABULARY)


def test_a_cache_says_its_bytes():
    def size(case):
        batch, cache = CASES[case]
        return StepBatch(batch(), cache, 5, ANY_AGE, VOCABULARY).cached_bytes

    assert size("poisson") == 7 * 12
    assert size("multi_sample") == 7 * 14
    assert size("teacher_top_k") == 7 * 8
    assert size("dense") == 6 * 4 * 4
    assert size("teacher_hidden") == 6 * 3 * 2


@pytest.mark.parametrize("case", ["multi_sample", "teacher_multi_sample"])
def test_how_often_an_id_was_drawn_stays_with_the_id(case):
    batch, cache = CASES[case][0](), CASES[case][1]
    support = micro(batch, cache, [2, 1, 0]).support
    assert support.ids.tolist() == [76, 73, 74, 75, 70, 71, 72]
    assert support.draws.tolist() == [7, 4, 5, 6, 1, 2, 3]


@pytest.mark.parametrize("case", ["sampled", "poisson", "teacher_top_k", "dense"])
def test_a_cache_that_counts_no_draws_has_none(case):
    batch, cache = CASES[case][0](), CASES[case][1]
    assert len(micro(batch, cache, [0, 1, 2]).support.draws) == 0


def test_rollouts_that_were_cached_sparsely_can_be_scored_densely():
    # As for evaluation: what the sampler kept doesn't belong to the teacher's scores of all ids.
    batch = scored(
        lists(KEPT, pa.int32()),
        kept_logprobs(0),
        empty_lists([3, 1, 2], np.int32),
        dense_scores(),
        draws=kept_draws(),
    )
    support = micro(batch, Dense(), [0, 1, 2]).support
    assert support.is_dense
    assert len(support.ids) == len(support.sampler_logprobs) == len(support.draws) == 0
    assert_equal(micro(batch, Dense(), [2, 0]), micro(dense_batch(), Dense(), [2, 0]))


def test_a_dense_cache_of_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match="all 4 ids"):
        StepBatch(dense_batch(vocabulary=3), Dense(), 5, ANY_AGE, VOCABULARY)


# Ages


def test_version_runs_expand_to_one_version_for_each_token():
    assert token_versions(sampled_batch()).tolist() == [4, 4, 5, 5, 3, 5]
    runs = [[{"version": 2, "length": 2}, {"version": 9, "length": 1}], [], []]
    batch = pa.RecordBatch.from_arrays([pa.array(runs, VERSION_RUNS)], names=["version_runs"])
    assert token_versions(batch).tolist() == [2, 2, 9]


# At version 6 ages are 2 2 1; 1; 3 1.
@pytest.mark.parametrize(
    ("max_age", "tokens"),
    [
        (3, [10, 11, 12, 20, 30, 31]),
        (2, [10, 11, 12, 20, 31]),
        (1, [12, 20, 31]),
        (0, []),
    ],
)
@each_cache
def test_tokens_beyond_the_bound_are_left_out_and_no_other(case, max_age, tokens):
    batch, cache = CASES[case][0](), CASES[case][1]
    step = StepBatch(batch, cache, 6, max_age, VOCABULARY)
    assert step.ages.tolist() == [2, 2, 1, 1, 3, 1]
    assert step.counted.tolist() == [age <= max_age for age in step.ages]
    assert step.counted_tokens(step.rows) == len(tokens)
    part = step.micro(step.rows, CPU)
    assert part.support.token_ids.tolist() == tokens
    assert len(part.sequences.sources) == len(part.support) == len(part.fresh) == len(tokens)
    assert part.ages.tolist() == step.ages[step.counted].tolist()
    whole = micro(batch, cache, [0, 1, 2])
    assert torch.equal(part.sequences.input_ids, whole.sequences.input_ids), "masked is still read"
    # What is left belongs to the same tokens as without a mask.
    kept = [whole.support.token_ids.tolist().index(token) for token in tokens]
    assert part.sequences.sources.tolist() == whole.sequences.sources[kept].tolist()
    for row, position in enumerate(kept):
        ours = slice(*part.support.offsets[row : row + 2].tolist())
        theirs = slice(*whole.support.offsets[position : position + 2].tolist())
        for name in ("ids", "sampler_logprobs", "teacher_logprobs", "draws"):
            one, other = getattr(part.support, name)[ours], getattr(whole.support, name)[theirs]
            assert torch.equal(one, other), name


def test_only_tokens_of_age_zero_in_responses_of_one_version_are_fresh():
    # Versions 4 4 5; 5; 3 5: the last token of row 0 is of age 0, but went through a swap.
    assert micro(sampled_batch(), Sampled(), [0, 1, 2]).fresh.tolist() == [
        *(False, False, False),
        True,
        *(False, False),
    ]
    assert not micro(sampled_batch(), Sampled(), [0, 1, 2], version=6).fresh.any()


def test_ages_are_those_of_the_rows_own_tokens():
    # Versions 4 4 5; 5; 3 5, in another order of the rows.
    assert micro(sampled_batch(), Sampled(), [2, 0, 1]).ages.tolist() == [2, 0, 1, 1, 0, 0]
    assert micro(sampled_batch(), Sampled(), [2, 0], max_age=1).ages.tolist() == [0, 1, 1, 0]


# Entries of the whole step


@pytest.mark.parametrize("max_age", [ANY_AGE, 1])
@each_cache
def test_a_value_for_each_entry_of_the_step_reaches_its_entry_in_any_micro_batch(case, max_age):
    batch, cache = CASES[case][0](), CASES[case][1]
    step = StepBatch(batch, cache, 5, max_age, VOCABULARY)
    everything = batch["teacher_logprobs"].flatten().flatten().to_numpy()
    assert step.entries == len(everything)
    rows = [[2, 0], [1], [0, 1, 2]]
    before = [step.micro(np.array(part), CPU) for part in rows]
    step.set_proximal(everything - 10)
    for part, plain in zip(rows, before, strict=True):
        assert len(plain.support.proximal_logprobs) == 0, "nobody asked for it"
        assert plain.support.teacher_logprobs.tolist() == everything[plain.entries].tolist()
        support = step.micro(np.array(part), CPU).support
        assert torch.equal(support.proximal_logprobs, plain.support.teacher_logprobs - 10)
        assert torch.equal(support.teacher_logprobs, plain.support.teacher_logprobs)


# Padding, micro-batches, slices


@each_cache
def test_neither_the_company_nor_the_padding_changes_what_belongs_to_a_row(case):
    batch, cache = CASES[case][0](), CASES[case][1]
    together = micro(batch, cache, [0, 1, 2])
    start = entry = 0
    for row, (size, length) in enumerate([(3, 5), (1, 2), (2, 5)]):
        alone = micro(batch, cache, [row])
        stop, end = start + size, entry + len(alone.support.teacher_logprobs)
        assert torch.equal(alone.sequences.input_ids[0], together.sequences.input_ids[row, :length])
        assert not together.sequences.attention_mask[row, length:].any()
        shifted = together.sequences.sources[start:stop] - 5 * row
        assert torch.equal(alone.sequences.sources, shifted)
        assert torch.equal(alone.support.token_ids, together.support.token_ids[start:stop])
        assert torch.equal(
            alone.support.teacher_logprobs, together.support.teacher_logprobs[entry:end]
        )
        assert torch.equal(alone.fresh, together.fresh[start:stop])
        start, entry = stop, end


@each_cache
def test_a_slice_of_an_arrow_batch_gives_the_same_tensors_as_a_copy(case):
    batch, cache = CASES[case][0](), CASES[case][1]
    for first, length in ((1, 2), (1, 1), (0, 2), (2, 1)):
        sliced = batch.slice(first, length)
        copied = batch.take(pa.array(range(first, first + length), pa.int32()))
        rows = list(range(length))
        assert_equal(micro(sliced, cache, rows), micro(copied, cache, rows))
        assert_equal(micro(sliced, cache, rows), micro(batch, cache, [first + r for r in rows]))
        assert token_versions(sliced).tolist() == token_versions(copied).tolist()
        one, other = sequences(sliced, np.array(rows)), sequences(copied, np.array(rows))
        assert torch.equal(one.input_ids, other.input_ids)


@each_cache
def test_merged_rows_are_those_that_were_asked_for_in_order(case):
    batch, cache = CASES[case][0](), CASES[case][1]
    merged = merge([batch, batch.slice(1)], [[2, 0], [0]])
    assert merged["ticket"].to_pylist() == [3, 1, 2]
    assert_equal(micro(merged, cache, [0, 1, 2]), micro(batch, cache, [2, 0, 1]))


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.integers(1, 100),
    st.data(),
)
def test_groups_keep_to_the_budget_and_hold_each_row_once(lengths, budget, data):
    sizes = np.array(lengths)
    rows = np.array(data.draw(st.permutations(range(len(lengths)))))
    groups = split(sizes, rows, budget)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
    for group in groups:
        padded = len(group) * sizes[group].max()
        assert padded <= budget or len(group) == 1


def cost(groups: list[list[int]], budget: int) -> float:
    """Of groups of lengths: padded tokens and PASS_TOKENS for each; infinite beyond the budget."""
    padded = [len(group) * max(group) for group in groups]
    fits = all(
        size <= budget or len(group) == 1 for size, group in zip(padded, groups, strict=True)
    )
    return sum(padded) + PASS_TOKENS * len(groups) if fits else float("inf")


@given(st.lists(st.integers(1, 900), min_size=1, max_size=7), st.integers(1, 3000))
def test_no_other_split_of_the_rows_in_order_of_length_costs_less(lengths, budget):
    ordered = sorted(lengths, reverse=True)
    n = len(ordered)
    every = [
        [ordered[a:b] for a, b in itertools.pairwise([0, *cuts, n])]
        for count in range(n)
        for cuts in itertools.combinations(range(1, n), count)
    ]
    groups = split(np.array(lengths), np.arange(n), budget)
    found = cost([[lengths[row] for row in group] for group in groups], budget)
    assert found == min(cost(each, budget) for each in every)


def test_one_long_row_does_not_pad_the_short_ones_to_its_length():
    lengths = np.array([10, 1000, 12, 11])
    groups = split(lengths, np.arange(4), 100_000)
    assert sorted(sorted(group.tolist()) for group in groups) == [[0, 2, 3], [1]]
    assert split(lengths, np.array([], int), 18) == []


def test_a_step_is_split_by_prompt_and_response_together():
    # 5, 2 and 5 tokens.
    step = StepBatch(sampled_batch(), Sampled(), 5, ANY_AGE, VOCABULARY)

    def groups(budget: int) -> list[list[int]]:
        return sorted(sorted(group.tolist()) for group in step.split(step.rows, budget))

    assert groups(15) == [[0, 1, 2]]
    assert groups(9) == [[0], [1], [2]]


def test_ragged_lists_are_views_that_know_their_positions():
    array = pa.array([[9], [1, 2], [], [3, 4, 5]], pa.list_(pa.int32()))
    lists_ = Ragged.of(array.slice(1))
    assert lists_.values.tolist() == [1, 2, 3, 4, 5]
    assert lists_.lengths.tolist() == [2, 0, 3]
    assert lists_.positions(np.array([2, 1, 0])).tolist() == [2, 3, 4, 0, 1]
    taken = lists_.take(np.array([2, 2]))
    assert taken.values.tolist() == [3, 4, 5, 3, 4, 5]
    assert taken.offsets.tolist() == [0, 3, 6]
    assert lists_.take(np.array([], int)).values.tolist() == []


def test_tensors_are_copies_that_can_be_written_to():
    batch = sampled_batch()
    step = micro(batch, Sampled(), [0])
    for tensor in (step.sequences.input_ids, step.support.ids, step.support.teacher_logprobs):
        tensor.fill_(7)
    assert_equal(micro(batch, Sampled(), [0]), micro(sampled_batch(), Sampled(), [0]))
