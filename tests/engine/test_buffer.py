"""Which scored rollouts the learner gets, and which are given back."""

import pytest

from engine.buffer import Buffer, Row
from engine.schema import RolloutMeta
from engine.staleness import Bound


def row(ticket: int, oldest: int = 0, newest: int | None = None, attempt: int = 0) -> Row:
    newest = oldest if newest is None else newest
    return Row("batch", RolloutMeta(ticket, attempt, 0, 2, 3, oldest, newest, "stop", None))


def tickets(rows: list[Row] | None) -> list[int] | None:
    return None if rows is None else [row.meta.ticket for row in rows]


@pytest.mark.parametrize("older", ["mask", "drop"])
def test_a_batch_is_the_oldest_rows_however_they_arrived(older):
    buffer = Buffer(Bound(9, older))
    buffer.add([row(4, oldest=2), row(9, oldest=0), row(1, oldest=2)])
    buffer.add([row(7, oldest=1), row(5, oldest=3)])
    # By version first, then by ticket: (0, 9), (1, 7), (2, 1), (2, 4), (3, 5).
    assert tickets(buffer.take(3, [])) == [9, 7, 1]
    assert tickets(buffer.rows()) == [4, 5]
    assert len(buffer) == 2


@pytest.mark.parametrize("older", ["mask", "drop"])
def test_there_is_no_batch_before_it_is_complete(older):
    buffer = Buffer(Bound(9, older))
    buffer.add([row(0), row(1)])
    assert buffer.take(3, [0, 1, 2]) is None
    assert len(buffer) == 2
    buffer.add([row(8)])
    assert tickets(buffer.take(3, [0, 1, 2])) == [0, 1, 8]


def test_the_age_of_a_row_is_that_of_its_oldest_token():
    buffer = Buffer(Bound(9, "mask"))
    buffer.add([row(0, oldest=3, newest=3), row(1, oldest=1, newest=5)])
    assert tickets(buffer.take(1, [])) == [1]


def test_a_learner_that_waits_gets_exactly_the_rollouts_that_were_started_first():
    buffer = Buffer(Bound(9, "wait"))
    buffer.add([row(6), row(2), row(3), row(4)])
    assert buffer.take(2, [5, 6, 2, 3, 4]) is None, "5 is still out"
    assert len(buffer) == 4
    buffer.add([row(5, oldest=1)])
    assert tickets(buffer.take(2, [5, 6, 2, 3, 4])) == [5, 6]
    assert tickets(buffer.take(2, [2, 3, 4])) == [2, 3]


def test_a_learner_that_waits_is_not_served_while_too_few_are_started():
    buffer = Buffer(Bound(9, "wait"))
    buffer.add([row(0)])
    assert buffer.take(2, [0]) is None
    assert len(buffer) == 1


# At version 5 with a bound of 2, version 3 is the oldest that counts.
@pytest.mark.parametrize(("older", "stale"), [("mask", [1]), ("drop", [1, 2]), ("wait", [1, 2])])
def test_rows_beyond_the_bound_are_removed_and_returned(older, stale):
    buffer = Buffer(Bound(2, older))
    buffer.add([row(0, 3, 5), row(1, 2, 2), row(2, 2, 3), row(3, 5, 5)])
    assert sorted(tickets(buffer.evict(5))) == stale
    assert sorted(tickets(buffer.rows())) == sorted({0, 1, 2, 3} - set(stale))
    assert buffer.evict(5) == []


def test_a_row_keeps_its_handle_and_its_metadata():
    buffer = Buffer(Bound(2, "mask"))
    added = Row(object(), row(3, attempt=2).meta)
    buffer.add([added])
    assert buffer.take(1, [])[0] is added
