"""The real loop on scripted workers: every permit and every token accounted for, in any order.

`Factory` runs `CheckedLoop`, which after each event compares permits with where the tickets are.
"""

import asyncio
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.loop import MAX_ATTEMPTS
from engine.metrics import CATALOGUE, UnknownMetricError
from engine.schema import row_lengths
from engine.staleness import Stage
from tests.engine.fakes import Factory, FakeWorkerError, pass_turns, run_config

OLDER = ["mask", "drop", "wait"]
each_bound = pytest.mark.parametrize("stale", [0, 1, 3])
each_mode = pytest.mark.parametrize("older", OLDER)


def one_slow(ticket: int) -> int:
    """Ten times as long as the others."""
    return 40 if ticket == 5 else 4


def uneven(ticket: int) -> int:
    return 1 + ticket * 7 % 11


def counted_ages(factory: Factory) -> list[int]:
    return [
        age
        for row in factory.trained
        for age, counted in zip(row.ages, row.counted, strict=True)
        if counted
    ]


def masked(factory: Factory) -> int:
    return sum(not counted for row in factory.trained for counted in row.counted)


def total(factory: Factory, metric: str) -> float:
    return sum(record.metrics[metric] for record in factory.records)


def trained_tickets(factory: Factory) -> list[int]:
    return sorted(row.ticket for row in factory.trained)


def assert_complete(factory: Factory) -> None:
    """The run has ended in good order: full batches, and nothing outstanding."""
    batch = factory.config.training.batch
    steps = Counter(row.step for row in factory.trained)
    assert steps == dict.fromkeys(range(factory.steps), batch)
    assert factory.loop.version == factory.steps
    assert factory.loop.permits.leases == {}
    assert len(factory.loop.buffer) == 0
    assert len(set(trained_tickets(factory))) == factory.steps * batch, "nothing is trained twice"


def assert_each_ticket_trained_once(factory: Factory) -> None:
    """As much was generated as was trained."""
    assert_complete(factory)
    count = factory.steps * factory.config.training.batch
    assert trained_tickets(factory) == list(range(count))
    assert factory.stream.cursor == count
    assert factory.stream.waiting == []


# Permits and ages


@each_mode
@each_bound
def test_the_oldest_trained_token_is_as_old_as_the_bound_and_no_older(stale, older):
    factory = Factory(
        run_config(stale=stale, older=older, steps=12),
        length=one_slow,
        rollout_turns=[(1,), (3, 1)],
        learner_turns=(2,),
    ).run()
    assert max(counted_ages(factory)) == stale
    assert_complete(factory)
    assert factory.loop.events > 5 * factory.steps, "permits were checked all along"


@each_bound
def test_old_tokens_are_masked_and_the_fresh_rest_of_the_response_trains(stale):
    factory = Factory(
        run_config(stale=stale, older="mask", steps=14), length=one_slow, learner_turns=(1,)
    ).run()
    for row in factory.trained:
        assert row.counted == [age <= stale for age in row.ages]
        assert any(row.counted)
        assert row.attempt == 0
    slow = next(row for row in factory.trained if row.ticket == 5)
    if stale:  # at 0 there is no other batch while the slow one is out
        assert not all(slow.counted)
        assert slow.ages == sorted(slow.ages, reverse=True), "it spans versions"
    assert masked(factory) == sum(not c for c in slow.counted)
    assert total(factory, "staleness/dropped_responses") == 0
    assert_each_ticket_trained_once(factory)


@pytest.mark.parametrize("stale", [1, 3])
def test_old_responses_are_dropped_and_their_prompts_tried_again_until_given_up(stale):
    factory = Factory(
        run_config(stale=stale, older="drop", steps=60), length=one_slow, learner_turns=(1,)
    ).run()
    attempts = [attempt for ticket, attempt, _ in factory.floor.started if ticket == 5]
    assert attempts == list(range(MAX_ATTEMPTS)), "the slow one never comes in time"
    assert total(factory, "staleness/dropped_responses") == MAX_ATTEMPTS
    assert total(factory, "staleness/given_up_prompts") == 1
    assert masked(factory) == 0
    assert_complete(factory)
    # Ticket 5 is given up; one more prompt takes its place.
    assert trained_tickets(factory) == [t for t in range(4 * 60 + 1) if t != 5]


def test_a_dropped_prompt_trains_in_its_second_attempt_if_that_is_in_time():
    # The 40 tokens of ticket 5 take long for a fast learner; after 3 steps it is a slow one.
    learner = (1,) * 3 + (400,) * 6
    factory = Factory(
        run_config(stale=1, older="drop", steps=9), length=one_slow, learner_turns=learner
    ).run()
    assert [row.attempt for row in factory.trained if row.ticket == 5] == [1]
    assert total(factory, "staleness/dropped_responses") == 1
    assert total(factory, "staleness/given_up_prompts") == 0
    assert_each_ticket_trained_once(factory)


@each_bound
def test_a_learner_that_waits_neither_masks_nor_drops_and_takes_the_order_of_starting(stale):
    factory = Factory(
        run_config(stale=stale, older="wait", steps=12),
        length=one_slow,
        rollout_turns=[(1,), (9, 1, 1)],
        teacher_turns=[(1, 30), (1,)],
    ).run()
    assert masked(factory) == 0
    assert total(factory, "staleness/dropped_responses") == 0
    assert_each_ticket_trained_once(factory)
    by_step = [
        sorted(row.ticket for row in factory.trained if row.step == step) for step in range(12)
    ]
    started = [ticket for ticket, _, _ in factory.floor.started]
    assert by_step == [sorted(started[4 * step : 4 * step + 4]) for step in range(12)]


@each_mode
def test_a_bound_of_zero_is_strictly_synchronous(older):
    factory = Factory(
        run_config(stale=0, older=older, steps=8),
        length=uneven,
        rollout_turns=[(1,), (4, 1)],
        teacher_turns=[(1, 7), (2,)],
        learner_turns=(5,),
    ).run()
    # Batch k is started when step k has been published, not sooner and not later.
    assert [published for _, _, published in factory.floor.started] == [
        ticket // 4 for ticket in range(32)
    ]
    assert set(counted_ages(factory)) == {0}
    assert masked(factory) == 0
    assert_each_ticket_trained_once(factory)


@pytest.mark.parametrize("stale", [1, 3])
def test_generation_runs_ahead_by_the_bound_at_most_and_does_so(stale):
    factory = Factory(run_config(stale=stale, steps=8), learner_turns=(100,)).run()
    # Ticket t starts when at most (stale + 1) * 4 others are outstanding.
    ahead = [ticket // 4 - published for ticket, _, published in factory.floor.started]
    assert max(ahead) == stale
    assert factory.loop.most == factory.loop.permits.total


def test_no_more_is_outstanding_than_the_depth_allows():
    factory = Factory(
        run_config(stale=3, steps=8), length=uneven, learner_turns=(50,), depths=(5,)
    ).run()
    assert factory.loop.most == 5, "though there are 16 permits"
    assert {record.metrics["queue/depth"] for record in factory.records} == {5}
    assert_each_ticket_trained_once(factory)


def test_the_depth_is_told_of_a_waiting_learner_and_of_what_is_left_over():
    # A fast learner takes all that there is. For a slow one all 16 permits are in use: in a step's
    # end 4 are given back, and the next step takes 4 of the other 12.
    fast = Factory(run_config(stale=3, steps=9), learner_turns=(1,), depths=(4,)).run()
    assert [left for *_, left, _ in fast.depth.observed] == [0] * 9
    slow = Factory(run_config(stale=3, steps=9), learner_turns=(200,)).run()
    assert [left for *_, left, _ in slow.depth.observed][1:] == [8, 8, 8, 8, 8, 8, 4, 0]
    slots = run_config().rollout.slots
    assert {effective for *_, effective in fast.depth.observed} == {1.0}, "none was said"
    drifting = Factory(run_config(stale=3, steps=3))
    drifting.learner.metrics = {"policy/effective_sample": 0.7}
    assert {effective for *_, effective in drifting.run().depth.observed} == {0.7}
    for waited, free, *_ in fast.depth.observed + slow.depth.observed:
        assert 0 <= waited <= 1
        assert 0 <= free <= slots


@each_mode
@each_bound
def test_a_worker_that_uses_weights_late_can_not_push_a_token_beyond_the_bound(stale, older):
    factory = Factory(
        run_config(stale=stale, older=older, steps=12),
        length=uneven,
        rollout_turns=[(1,), (2,)],
        lags=[0, 5],
    ).run()
    assert max(counted_ages(factory)) == stale
    assert_complete(factory)
    late = masked(factory) + total(factory, "staleness/dropped_responses")
    if stale == 0:
        assert late > 0, "the late worker's tokens were refused, and counted"
    if older != "mask":
        assert masked(factory) == 0


@each_mode
@each_bound
def test_a_teacher_that_hangs_on_one_batch_holds_up_no_other_and_ages_nothing_unseen(stale, older):
    # The first teacher's second call takes as long as many steps.
    factory = Factory(
        run_config(stale=stale, older=older, steps=12, budget=30),
        length=uneven,
        teacher_turns=[(1, 150, *(1,) * 500), (1,)],
    ).run()
    assert max(counted_ages(factory)) == stale
    assert_complete(factory)
    if older == "wait":
        assert masked(factory) + total(factory, "staleness/dropped_responses") == 0
    elif stale:
        assert total(factory, "staleness/dropped_responses") > 0, "the hung batch came too late"
        assert len(factory.teachers[1].calls) > 10, "the other teacher went on"


@settings(max_examples=50)
@given(
    stale=st.sampled_from([0, 1, 3]),
    older=st.sampled_from(OLDER),
    batch=st.integers(1, 5),
    slots=st.integers(1, 4),
    budget=st.sampled_from([1, 20, 10_000]),
    rollouts=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=4), min_size=1, max_size=3),
    teachers=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=4), min_size=1, max_size=2),
    learner=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    lags=st.lists(st.sampled_from([0, 0, 1, 4]), min_size=1, max_size=3),
    lengths=st.lists(st.sampled_from([1, 2, 5, 30]), min_size=1, max_size=7),
    depths=st.lists(st.integers(1, 20), max_size=3),
    ends=st.sets(st.integers(1, 5), max_size=3),
    barrier=st.booleans(),
    beside=st.lists(st.integers(1, 20), min_size=2, max_size=2),
)
def test_in_any_order_a_run_ends_with_all_accounted_for_and_no_token_beyond_the_bound(
    stale,
    older,
    batch,
    slots,
    budget,
    rollouts,
    teachers,
    learner,
    lags,
    lengths,
    depths,
    ends,
    barrier,
    beside,
):
    factory = Factory(
        run_config(
            stale=stale,
            older=older,
            steps=6,
            batch=batch,
            slots=slots,
            budget=budget,
            barrier=barrier,
        ),
        length=lambda ticket: lengths[ticket % len(lengths)],
        rollout_turns=rollouts,
        lags=lags,
        teacher_turns=teachers,
        learner_turns=learner,
        load_turns=beside[:1],
        publish_turns=beside[1:],
        depths=depths,
    ).run(*sorted(ends), 6)
    assert_complete(factory)
    assert max(counted_ages(factory)) <= stale
    dropped = total(factory, "staleness/dropped_responses")
    given_up = total(factory, "staleness/given_up_prompts")
    assert factory.stream.cursor == 6 * batch + given_up
    assert len(factory.floor.generated) == 6 * batch + dropped, "none generated for nothing"
    if older != "mask":
        assert masked(factory) == 0
    if older == "wait" and not any(lags):
        assert dropped == 0


# Which responses


@each_mode
@each_bound
def test_what_is_trained_is_as_long_as_what_was_generated(stale, older):
    factory = Factory(
        run_config(stale=stale, older=older, steps=20), length=uneven, learner_turns=(15, 20)
    ).run()
    assert_each_ticket_trained_once(factory)
    generated = sum(factory.floor.generated.values()) / len(factory.floor.generated)
    trained = sum(len(row.ages) for row in factory.trained) / len(factory.trained)
    # Lengths are 1 + 7 t mod 11 over 80 tickets, of mean 5.95 or so.
    assert trained == generated == sum(map(uneven, range(80))) / 80
    assert total(factory, "train/response_tokens") / 20 == pytest.approx(trained)


@pytest.mark.parametrize("older", ["mask", "drop"])
def test_a_finished_long_response_is_not_pushed_out_by_short_ones(older):
    # Ticket 5 finishes in its 8th slice, when short ones of newer versions wait as well.
    factory = Factory(
        run_config(stale=3, older=older, steps=12),
        length=lambda ticket: 8 if ticket == 5 else 1,
        learner_turns=(4,),
    ).run()
    slow = next(row for row in factory.trained if row.ticket == 5)
    rivals = [row for row in factory.trained if row.step == slow.step + 1]
    oldest = slow.step - max(slow.ages)
    assert all(row.step - max(row.ages) >= oldest for row in rivals)
    assert slow.step < 5


# No deadlock, nothing superfluous


def test_rollouts_that_never_fill_the_token_budget_are_sent_when_the_flush_time_is_over():
    factory = Factory(run_config(batch=1, stale=0, steps=3, budget=10**9, flush=0.001)).run()
    assert factory.teachers[0].calls == [1, 1, 1], "each was alone"
    assert_each_ticket_trained_once(factory)


def test_waiting_rollouts_are_sent_as_many_as_fit_once_they_fill_the_token_budget():
    # One at a time come rollouts of 5 tokens. Three fill a budget of 12, and two fit into it; the
    # flush time would outlast the test.
    config = run_config(batch=9, stale=0, slots=1, budget=12, flush=1000.0, concurrent=1)
    factory = Factory(config, length=lambda ticket: 5 - tokens[ticket])
    stream = factory.stream.take(9)
    tokens = dict(zip(stream["ticket"].to_pylist(), row_lengths(stream, "prompt_ids"), strict=True))
    factory.stream.restore(0, [])

    async def until_too_few_are_left() -> None:
        generation = asyncio.create_task(factory.loop.generate(1))
        quiet = 0
        while quiet < 20:  # turns without a rollout in generation or at the teacher
            busy = "teacher-0" in factory.floor.place.values()
            quiet = 0 if busy or len(factory.floor.generated) < 9 else quiet + 1
            await asyncio.sleep(0)
        generation.cancel()

    asyncio.run(until_too_few_are_left())
    # Calls come at 3, 5, 7, and 9 finished rollouts; one stays behind.
    assert factory.teachers[0].calls == [2, 2, 2, 2]
    assert list(factory.floor.place.values()).count("queue") == 1


def test_a_rollout_larger_than_the_token_budget_is_scored_alone():
    factory = Factory(run_config(slots=1, budget=2, flush=1000.0), teacher_turns=[(9,)]).run()
    assert set(factory.teachers[0].calls) == {1}
    assert_each_ticket_trained_once(factory)


@pytest.mark.parametrize(
    ("batch", "slots", "workers"),
    [(5, 2, 1), (7, 3, 2), (2, 100, 5), (1, 1, 4), (3, 1, 7)],
)
@each_mode
@each_bound
def test_any_ratio_of_batch_slots_and_workers_runs_to_its_end(stale, older, batch, slots, workers):
    factory = Factory(
        run_config(batch=batch, slots=slots, stale=stale, older=older, steps=5),
        rollout_turns=[(1 + i,) for i in range(workers)],
        length=lambda ticket: 2,
    ).run()
    assert_complete(factory)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_worker_never_has_more_rollouts_than_slots(slots):
    factory = Factory(
        run_config(batch=8, slots=slots, stale=3), rollout_turns=[(1,), (2,)], length=uneven
    )
    most: Counter[str] = Counter()

    async def watch() -> None:
        async with asyncio.TaskGroup() as group:
            run = group.create_task(factory.segments(6))
            while not run.done():
                most.update()  # keeps the keys
                for worker in factory.rollouts:
                    most[worker.name] = max(
                        most[worker.name], list(factory.floor.place.values()).count(worker.name)
                    )
                await asyncio.sleep(0)

    asyncio.run(watch())
    assert most == {"rollout-0": slots, "rollout-1": slots}


def test_workers_share_the_permits_evenly_at_the_start():
    factory = Factory(run_config(batch=6, stale=1), rollout_turns=[(1,), (1,), (1,)])
    held = {worker.name: 0 for worker in factory.rollouts}

    async def first_turns() -> None:
        generation = asyncio.create_task(factory.loop.generate(1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for name in held:
            held[name] = len(factory.loop.permits.held_by(name))
        generation.cancel()

    asyncio.run(first_turns())
    assert set(held.values()) == {4}, "12 permits for 3 workers"


def test_requests_go_to_the_teacher_worker_with_the_least_to_do():
    factory = Factory(
        run_config(stale=3, steps=40, batch=4, budget=1),
        teacher_turns=[(1,), (60,), (1,)],
        rollout_turns=[(1,), (1,)],
        length=uneven,
    ).run()
    fast, slow, other = (sum(teacher.calls) for teacher in factory.teachers)
    assert slow < fast / 3 and slow < other / 3
    assert_each_ticket_trained_once(factory)


@pytest.mark.parametrize("concurrent", [1, 2, 3])
def test_a_teacher_worker_has_so_many_requests_at_the_same_time_if_they_are_full(concurrent):
    config = run_config(stale=3, steps=20, budget=1, concurrent=concurrent)
    factory = Factory(config, teacher_turns=[(50,)]).run()
    assert factory.teachers[0].most == concurrent
    # Rollouts that don't fill the budget wait until the worker is free.
    config = run_config(stale=3, steps=20, budget=10**9, concurrent=concurrent)
    factory = Factory(config, teacher_turns=[(50,)]).run()
    assert factory.teachers[0].most == 1


def test_the_last_steps_generate_no_more_than_they_need():
    factory = Factory(run_config(stale=3, steps=2, batch=5)).run()
    assert len(factory.floor.started) == 10, "though 20 permits are there"
    assert_each_ticket_trained_once(factory)


# Weights


def test_weights_go_to_a_worker_only_when_it_is_behind():
    factory = Factory(run_config(stale=1, steps=10), rollout_turns=[(1,), (7,)]).run()
    for worker in factory.rollouts:
        given = [weights for weights, _ in worker.received]
        assert all(weights > had for weights, had in worker.received)
        assert given == sorted(set(given)), "none twice"
        assert len(given) > 1


def test_weights_are_sent_again_to_a_worker_that_still_reports_an_old_version():
    factory = Factory(run_config(stale=1, steps=6), lags=[2], learner_turns=(30,)).run()
    given = Counter(weights for weights, _ in factory.rollouts[0].received)
    assert given[1] == 3, "at once, and in each slice until it is in use"


def test_one_worker_has_new_weights_while_another_is_in_the_middle_of_a_slice():
    factory = Factory(run_config(stale=3, steps=30), rollout_turns=[(1,), (10**6,)])
    seen = []

    async def until_published() -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(factory.loop.generate(30)),
                group.create_task(factory.loop.train(2)),
            ]
            async with asyncio.timeout(60):
                while factory.rollouts[0].version < 2:
                    await asyncio.sleep(0)
            seen.extend(worker.version for worker in factory.rollouts)
            for task in tasks:
                task.cancel()

    asyncio.run(until_published())
    assert seen == [2, 0]


# Beside the step


@each_mode
@pytest.mark.parametrize("stale", [1, 3])
def test_the_next_batch_is_loaded_while_the_learner_trains(stale, older):
    config = run_config(stale=stale, older=older, steps=12)
    factory = Factory(config, learner_turns=(60,), load_turns=(9,)).run()
    assert factory.learner.beside >= 10, "all but the first, and the one when permits ran out"
    assert total(factory, "wait/learner") < 12
    assert_each_ticket_trained_once(factory)


def test_nothing_is_loaded_beside_a_step_when_training_is_synchronous():
    factory = Factory(run_config(stale=0, steps=12), learner_turns=(60,), load_turns=(9,)).run()
    assert factory.learner.beside == 0


@each_mode
@each_bound
def test_permits_come_back_when_weights_are_published_however_long_that_takes(stale, older):
    factory = Factory(
        run_config(stale=stale, older=older, steps=12),
        length=uneven,
        learner_turns=(3,),
        publish_turns=(1, 40),
    ).run()
    # Ticket t begins when step t // 4 - stale has been published, and its weights are in use.
    for ticket, attempt, published in factory.floor.started:
        if attempt == 0:
            assert ticket // 4 - published <= stale
    assert max(counted_ages(factory)) == stale
    assert_complete(factory)


# Whole batches


@pytest.mark.parametrize("older", OLDER)
@pytest.mark.parametrize("stale", [0, 1, 2])
def test_under_the_barrier_a_batch_is_generated_by_one_version_and_scored_when_complete(
    stale, older
):
    factory = Factory(
        run_config(stale=stale, older=older, steps=12, barrier=True, budget=1000, slots=3),
        length=uneven,
        rollout_turns=[(1,), (5, 2)],
        teacher_turns=[(7,)],
        learner_turns=(4,),
    ).run()
    assert_each_ticket_trained_once(factory)
    assert max(counted_ages(factory)) == stale
    assert masked(factory) + total(factory, "staleness/dropped_responses") == 0
    by_ticket = {row.ticket: row for row in factory.trained}
    for batch in range(12):
        rows = [by_ticket[ticket] for ticket in range(4 * batch, 4 * batch + 4)]
        assert {row.step for row in rows} == {batch}
        versions = {row.step - age for row in rows for age in row.ages}
        assert len(versions) == 1, "no weights are swapped within a batch"
    assert factory.teachers[0].calls == [4] * 12
    order = [ticket // 4 for ticket, _, _ in factory.floor.started]
    assert order == sorted(order), "a batch begins when the last has been generated"


# Failures


@pytest.mark.parametrize("who", ["rollout", "teacher"])
def test_the_death_of_a_worker_ends_generation_and_with_it_training(who):
    factory = Factory(run_config(steps=20))
    worker = factory.rollouts[0] if who == "rollout" else factory.teachers[0]
    worker.dies_at = 9
    ended = {}

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            ended["generate"] = group.create_task(factory.loop.generate(20))
            ended["train"] = group.create_task(factory.loop.train(20))

    with pytest.raises(ExceptionGroup) as error:
        asyncio.run(run())
    assert error.group_contains(FakeWorkerError, match=f"{who}-0")
    assert ended["train"].cancelled()
    assert error.group_contains(ExceptionGroup), "it came out of generate()"


def test_the_death_of_the_learner_ends_generation():
    factory = Factory(run_config(steps=20))
    factory.learner.dies_at = 3
    ended = {}

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            ended["generate"] = group.create_task(factory.loop.generate(20))
            group.create_task(factory.loop.train(20))

    with pytest.raises(ExceptionGroup) as error:
        asyncio.run(run())
    assert error.group_contains(FakeWorkerError, match="learner")
    assert ended["generate"].cancelled()
    assert factory.loop.version == 3


@pytest.mark.parametrize("turns", range(4))
def test_an_event_in_the_moment_of_the_end_keeps_nobody_waiting(turns):
    # A queue that waits for the flush time is woken by an event, and cancelled at the same time.
    factory = Factory(run_config(stale=3, budget=10**9, flush=1000.0))

    async def run() -> asyncio.Task:
        generation = asyncio.create_task(factory.loop.generate(6))
        while factory.loop.permits.count(Stage.SCORING) < 16:
            await asyncio.sleep(0)
        await pass_turns([9], 0)
        factory.loop.permits.move([0], Stage.SCORING, "queue")
        for _ in range(turns):
            await asyncio.sleep(0)
        generation.cancel()
        await asyncio.wait({generation}, timeout=60)
        return generation

    assert asyncio.run(run()).cancelled()


# Segments and restoring


@each_mode
@each_bound
def test_the_next_segment_goes_on_with_the_responses_in_flight(stale, older):
    factory = Factory(
        run_config(stale=stale, older=older, steps=9),
        length=uneven,
        rollout_turns=[(1,), (5,)],
        learner_turns=(2,),
    )
    in_flight = []

    async def run() -> None:
        for until in (2, 3, 7, 9):
            await factory.segments(until)
            assert factory.loop.version == until
            in_flight.append(factory.loop.permits.count(Stage.GENERATING))

    asyncio.run(run())
    assert_complete(factory)
    if stale:
        assert max(in_flight) > 0
    firsts = [ticket for ticket, attempt, _ in factory.floor.started if attempt == 0]
    assert len(firsts) == len(set(firsts)), "no rollout was started over"


def test_a_segment_that_is_over_already_does_nothing():
    factory = Factory(run_config()).run(3)
    started = len(factory.floor.started)
    factory.run(3)
    assert factory.loop.version == 3
    assert len(factory.floor.started) == started


def test_the_position_holds_all_that_is_not_scored_and_not_what_is():
    # The learner is slow, so that both kinds are outstanding after a step.
    factory = Factory(
        run_config(stale=3, steps=9), length=one_slow, learner_turns=(25,), rollout_turns=[(2,)]
    ).run(2)
    position = factory.loop.position()
    buffered = {row.meta.ticket for row in factory.loop.buffer.rows()}
    waiting = {ticket for ticket, _ in position.waiting}
    assert position.version == 2
    assert buffered
    assert waiting
    assert not buffered & waiting
    trained = set(trained_tickets(factory))
    assert buffered | waiting | trained == set(range(position.cursor))


def test_the_position_holds_what_is_queued_again_and_not_yet_handed_out():
    factory = Factory(run_config(stale=1, steps=9)).run(2)
    outstanding = factory.loop.position().waiting
    factory.stream.queue_again(3, 2)
    assert factory.loop.position().waiting == [*outstanding, (3, 2)]


@each_mode
@each_bound
def test_after_a_failure_each_ticket_is_trained_once_from_the_checkpoint_on(stale, older):
    factory = Factory(
        run_config(stale=stale, older=older, steps=9),
        length=uneven,
        rollout_turns=[(1,), (2, 1)],
        learner_turns=(12,),
    ).run(4)
    saved = factory.save()
    factory.learner.dies_at = 6
    with pytest.raises(ExceptionGroup):
        factory.run(9)
    assert factory.loop.version == 6, "two steps are lost, and done again"
    factory.restore(saved)
    assert factory.loop.version == 4
    factory.run(6, 9)
    assert_each_ticket_trained_once(factory)
    assert max(counted_ages(factory)) <= stale


@settings(max_examples=30)
@given(
    stale=st.sampled_from([0, 1, 3]),
    older=st.sampled_from(OLDER),
    ends=st.lists(st.integers(0, 7), min_size=1, max_size=3).map(sorted),
    rollouts=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=3),
    teachers=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=3), min_size=1, max_size=2),
    learner=st.lists(st.integers(1, 15), min_size=1, max_size=3),
    lengths=st.lists(st.sampled_from([1, 2, 5, 30]), min_size=1, max_size=7),
    overrun=st.integers(0, 40),
)
def test_no_ticket_is_lost_or_trained_twice_by_restoring_at_any_point(
    stale, older, ends, rollouts, teachers, learner, lengths, overrun
):
    factory = Factory(
        run_config(stale=stale, older=older, steps=7, batch=3),
        length=lambda ticket: lengths[ticket % len(lengths)],
        rollout_turns=rollouts,
        teacher_turns=teachers,
        learner_turns=learner,
    )
    for end in ends:
        factory.run(end)
        saved = factory.save()
        kept = list(factory.records)
        # The next segment gets some way and fails, or doesn't fail.
        for worker in (*factory.rollouts, *factory.teachers):
            worker.dies_at = overrun
        try:
            factory.run(7)
        except* FakeWorkerError:
            pass
        factory.restore(saved)
        factory.records[:] = kept
    factory.run(7)
    assert_complete(factory)
    assert max(counted_ages(factory)) <= stale
    dropped = total(factory, "staleness/dropped_responses")
    given_up = total(factory, "staleness/given_up_prompts")
    if older == "wait":
        assert masked(factory) + dropped == 0
    lost = set(range(factory.stream.cursor)) - set(trained_tickets(factory))
    assert len(lost) == given_up


def test_attempts_are_kept_across_a_restore():
    # Ticket 5 never comes in time; wherever the run is restored, it has three attempts in all.
    factory = Factory(
        run_config(stale=1, older="drop", steps=60), length=one_slow, learner_turns=(1,)
    )
    while not any(ticket == 5 and attempt == 1 for ticket, attempt, _ in factory.floor.started):
        factory.run(factory.loop.version + 1)
    saved = factory.save()
    before = total(factory, "staleness/dropped_responses")
    assert (5, 1) in saved[0].waiting
    factory.restore(saved)
    factory.run()
    attempts = [attempt for ticket, attempt, _ in factory.floor.started if ticket == 5]
    assert attempts == [1, 2]
    assert (before, total(factory, "staleness/dropped_responses")) == (1, 3)


# Records


def test_a_step_is_reported_with_numbers_of_the_catalogue_only():
    factory = Factory(run_config(stale=1, steps=6), length=one_slow, learner_turns=(1,)).run()
    assert [record.step for record in factory.records] == [1, 2, 3, 4, 5, 6]
    for step, record in enumerate(factory.records):
        assert record.metrics.keys() <= CATALOGUE.keys()
        assert all(math.isfinite(value) for value in record.metrics.values())
        rows = [row for row in factory.trained if row.step == step]
        lengths = [len(row.ages) for row in rows]
        assert record.metrics["train/response_tokens"] == sum(lengths) / 4
        assert record.metrics["train/finished"] == 1
        ages = Counter(
            age
            for row in rows
            for age, counted in zip(row.ages, row.counted, strict=True)
            if counted
        )
        assert record.age_tokens == ages
        assert "train/accuracy" not in record.metrics, "nothing was judged"


def test_queues_are_reported_as_they_are_at_the_end_of_the_step():
    seen = []
    factory = Factory(run_config(stale=3, steps=6), length=uneven, learner_turns=(9,))

    def compare(record) -> None:
        places = [
            factory.floor.place[t] for t in factory.loop.permits.leases if t in factory.floor.place
        ]
        seen.append(
            (
                record.metrics["queue/generating"] - places.count("rollout-0"),
                record.metrics["queue/scoring"] - places.count("queue") - places.count("teacher-0"),
                record.metrics["queue/buffered"] - places.count("buffer"),
            )
        )

    factory.loop._on_step = compare
    factory.run()
    assert seen == [(0, 0, 0)] * 6


def test_a_metric_that_the_catalogue_does_not_hold_is_an_error():
    factory = Factory(run_config())
    factory.learner.metrics = {"train/vibes": 1.0}
    with pytest.raises(ExceptionGroup) as error:
        factory.run()
    assert error.group_contains(UnknownMetricError, match="train/vibes")
