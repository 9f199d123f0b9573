"""The arithmetic of the age bound, and permits as leases."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import StalenessConfig
from engine.staleness import Bound, Depth, Lease, Permits, Stage


@pytest.mark.parametrize(("stale", "total"), [(0, 64), (1, 128), (3, 256)])
def test_permits_are_one_batch_for_each_step_that_generation_may_be_ahead(stale, total):
    bound = Bound.of(StalenessConfig(max=stale))
    assert bound.permits(64) == total


# At version 7 with a bound of 2, tokens of version 5 and newer are fresh.
@pytest.mark.parametrize("older", ["drop", "wait"])
@pytest.mark.parametrize(
    ("oldest", "newest", "usable"), [(5, 5, True), (5, 7, True), (4, 7, False), (4, 4, False)]
)
def test_a_response_is_usable_if_its_oldest_token_is(older, oldest, newest, usable):
    assert Bound(2, older).usable(oldest, newest, 7) is usable


@pytest.mark.parametrize(
    ("oldest", "newest", "usable"), [(5, 5, True), (0, 5, True), (0, 4, False), (4, 4, False)]
)
def test_where_old_tokens_are_masked_a_response_is_usable_if_its_newest_token_is(
    oldest, newest, usable
):
    assert Bound(2, "mask").usable(oldest, newest, 7) is usable


def test_with_a_bound_of_zero_only_the_current_version_is_usable():
    bound = Bound(0, "drop")
    assert bound.usable(3, 3, 3)
    assert not bound.usable(2, 3, 3)


def test_a_lease_keeps_its_permit_from_stage_to_stage_until_it_is_released():
    permits = Permits(5)
    permits.lease([10, 11], "rollout-0")
    permits.move([10], Stage.SCORING, "teacher-0")
    assert permits.free == 3
    assert permits.leases == {
        10: Lease(Stage.SCORING, "teacher-0"),
        11: Lease(Stage.GENERATING, "rollout-0"),
    }
    assert [permits.count(stage) for stage in Stage] == [1, 1, 0, 0]
    permits.move([10], Stage.BUFFERED, "buffer")
    permits.move([10], Stage.TRAINING, "learner")
    assert permits.free == 3
    permits.release([10])
    assert permits.free == 4
    assert list(permits.leases) == [11]


def test_leases_stay_in_the_order_in_which_rollouts_were_started():
    permits = Permits(5)
    permits.lease([30, 10], "a")
    permits.lease([20], "b")
    permits.lease([40], "a")
    permits.move([10, 30], Stage.SCORING, "teacher")
    permits.move([10, 30], Stage.GENERATING, "a")
    assert list(permits.leases) == [30, 10, 20, 40]
    assert permits.held_by("a") == [30, 10, 40]
    assert permits.held_by("nobody") == []


def test_more_permits_than_are_free_are_refused_and_none_is_taken():
    permits = Permits(2)
    permits.lease([1], "a")
    with pytest.raises(ValueError, match="2 permits asked for, 1 free"):
        permits.lease([2, 3], "a")
    assert permits.free == 1


def test_a_ticket_can_not_hold_two_permits():
    permits = Permits(3)
    permits.lease([1], "a")
    with pytest.raises(ValueError, match="ticket 1 already holds a permit"):
        permits.lease([1], "b")
    assert permits.leases[1].owner == "a"


def test_a_ticket_without_a_permit_can_neither_be_moved_nor_released():
    permits = Permits(3)
    with pytest.raises(ValueError, match="ticket 1 holds no permit"):
        permits.move([1], Stage.SCORING, "a")
    with pytest.raises(KeyError):
        permits.release([1])
    assert permits.free == 3


@settings(max_examples=40)
@given(st.data(), st.integers(1, 8))
def test_no_permit_is_lost_or_made_in_any_sequence_of_events(data, total):
    # The model: sets of tickets for each stage. Each event is one call, seen by `changed`.
    stages: dict[Stage, set[int]] = {stage: set() for stage in Stage}
    seen = []

    def changed() -> None:
        assert permits.free + sum(permits.count(stage) for stage in Stage) == total
        assert 0 <= permits.free <= total
        seen.append({stage: permits.count(stage) for stage in Stage})

    permits = Permits(total, changed)
    fresh = iter(range(1000))
    for _ in range(data.draw(st.integers(1, 20))):
        held = set().union(*stages.values())
        before = len(seen)
        if len(held) < total and data.draw(st.booleans()):
            count = data.draw(st.integers(1, total - len(held)))
            tickets = [next(fresh) for _ in range(count)]
            permits.lease(tickets, "worker")
            stages[Stage.GENERATING] |= set(tickets)
        elif held:
            some = data.draw(st.sets(st.sampled_from(sorted(held)), min_size=1))
            for group in stages.values():
                group -= some
            if data.draw(st.booleans()):
                stage = data.draw(st.sampled_from(Stage))
                permits.move(some, stage, "owner")
                stages[stage] |= some
            else:
                permits.release(some)
        else:
            continue
        assert len(seen) == before + 1, "each event is announced once"
        assert seen[-1] == {stage: len(group) for stage, group in stages.items()}
    assert set(permits.leases) == set().union(*stages.values())


# Depth


def test_the_depth_starts_at_two_batches_or_at_the_permits() -> None:
    assert Depth(batch=8, permits=40).value == 16
    assert Depth(batch=8, permits=8).value == 8


def test_a_learner_kept_waiting_while_slots_are_free_makes_it_deeper_up_to_the_permits() -> None:
    depth = Depth(batch=8, permits=19)
    depth.observe(waited=0.3, free_slots=3, unscored=0, left_over=0, effective=1.0)
    assert depth.value == 18
    depth.observe(waited=0.3, free_slots=3, unscored=0, left_over=0, effective=1.0)
    assert depth.value == 19


def test_a_learner_that_waits_for_full_workers_gains_nothing_from_depth() -> None:
    depth = Depth(batch=8, permits=40)
    depth.observe(waited=0.3, free_slots=0, unscored=0, left_over=0, effective=1.0)
    assert depth.value == 16


def test_responses_that_pile_up_before_the_teacher_make_it_shallower_though_the_learner_waits() -> (
    None
):
    depth = Depth(batch=8, permits=40)
    depth.observe(waited=0.3, free_slots=3, unscored=3, left_over=0, effective=1.0)
    assert depth.value == 18, "as yet, a learner that waits is a reason for more"
    depth.observe(waited=0.3, free_slots=3, unscored=4, left_over=0, effective=1.0)
    assert depth.value == 17


def test_rows_that_age_in_the_buffer_make_it_shallower_down_to_a_batch() -> None:
    depth = Depth(batch=8, permits=40)
    for expected in (15, 14, 13, 12, 11, 10, 9, 8, 8):
        depth.observe(waited=0.0, free_slots=3, unscored=0, left_over=4, effective=1.0)
        assert depth.value == expected


def test_a_learner_that_runs_away_from_its_rollouts_makes_it_shallower_though_it_waits() -> None:
    depth = Depth(batch=8, permits=40)
    for expected in (14, 12, 10, 8, 8):
        depth.observe(waited=0.3, free_slots=3, unscored=0, left_over=0, effective=0.7)
        assert depth.value == expected
    depth.observe(waited=0.3, free_slots=3, unscored=0, left_over=0, effective=0.85)
    assert depth.value == 10, "and deeper again when it has calmed down"


def test_strictly_synchronous_training_keeps_its_one_batch() -> None:
    depth = Depth(batch=8, permits=8)
    depth.observe(waited=0.5, free_slots=3, unscored=0, left_over=0, effective=1.0)
    depth.observe(waited=0.0, free_slots=3, unscored=0, left_over=8, effective=1.0)
    assert depth.value == 8
