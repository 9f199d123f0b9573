"""The teacher's worker against full forward passes of the same model."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from engine.config import (
    Dense,
    MultiSample,
    Poisson,
    Sampled,
    TeacherHidden,
    TeacherMultiSample,
    TeacherTopK,
)
from engine.learner import LearnerWorker
from engine.models import Language, teacher_head
from engine.schema import ROLLOUT, SCORED, validate
from engine.scoring import TeacherWorker
from tests.engine.tiny import (
    language,
    logprobs_of,
    prompt_batch,
    random_ids,
    rollout_batch,
    run_config,
    with_column,
)

PROMPTS = [random_ids(length, length, 50) for length in (3, 30, 1, 12, 7)]
RESPONSES = [random_ids(length, 90 + length, 50) for length in (9, 1, 2, 24, 5)]
CACHES = [
    Sampled(),
    MultiSample(n=8),
    Poisson(n=16),
    TeacherTopK(k=5),
    Dense(),
    TeacherHidden(),
]

each_cache = pytest.mark.parametrize("cache", CACHES, ids=lambda cache: cache.type)


@pytest.fixture(scope="module")
def student(tiny_student) -> Language:
    return language(tiny_student)


@pytest.fixture(scope="module")
def teacher(tiny_teacher) -> Language:
    return language(tiny_teacher)


@pytest.fixture(scope="module")
def rollouts(student):
    return {cache: rollout_batch(student, PROMPTS, RESPONSES, cache) for cache in CACHES}


def scored(teacher: Language, batch, cache, temperature=1.0, budget=4096, rows=None) -> list[dict]:
    batch, _ = TeacherWorker(teacher, temperature, budget).score([batch], cache, rows)
    return validate(batch, SCORED).to_pylist()


def truth(teacher: Language, row: dict, temperature: float = 1.0) -> np.ndarray:
    """[T, V]."""
    return logprobs_of(
        teacher.model, row["prompt_ids"], row["response_ids"], teacher.vocabulary, temperature
    ).numpy()


def assert_same_scores(some: list[dict], others: list[dict]) -> None:
    for one, other in zip(some, others, strict=True):
        assert one["teacher_ids"] == other["teacher_ids"]
        for name, tolerance in (("teacher_logprobs", 1e-6), ("teacher_hidden", 2e-3)):
            for a, b in zip(one[name], other[name], strict=True):
                np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("cache", CACHES[:3], ids=lambda cache: cache.type)
def test_scores_at_given_ids_are_a_full_forward_passs(teacher, rollouts, cache, temperature):
    for row in scored(teacher, rollouts[cache], cache, temperature):
        assert row["teacher_ids"] == row["teacher_draws"] == [[] for _ in row["response_ids"]]
        columns = (row["cache_ids"], row["teacher_logprobs"], truth(teacher, row, temperature))
        for ids, logprobs, expected in zip(*columns, strict=True):
            np.testing.assert_allclose(logprobs, expected[ids], atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_top_k_are_the_teachers_own_likeliest_ids(teacher, rollouts, temperature):
    cache = TeacherTopK(k=5)
    for row in scored(teacher, rollouts[cache], cache, temperature):
        columns = (row["teacher_ids"], row["teacher_logprobs"], truth(teacher, row, temperature))
        for ids, logprobs, expected in zip(*columns, strict=True):
            assert set(ids) == set(np.argsort(-expected)[:5])
            np.testing.assert_allclose(logprobs, expected[ids], atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_dense_scores_are_the_whole_vocabulary_without_padded_ids(teacher, rollouts, temperature):
    for row in scored(teacher, rollouts[Dense()], Dense(), temperature):
        np.testing.assert_allclose(
            row["teacher_logprobs"], truth(teacher, row, temperature), atol=1e-5
        )
        assert len(row["teacher_logprobs"][0]) == teacher.vocabulary


# The teacher's hidden states


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_hidden_states_and_the_head_that_was_published_give_the_whole_vocabulary(
    teacher, rollouts, temperature
):
    cache = TeacherHidden()
    worker = TeacherWorker(teacher, temperature, 64)
    head = teacher_head(
        teacher.folder, worker.head(), teacher.vocabulary, temperature, teacher.device
    )
    rows = scored(teacher, rollouts[cache], cache, temperature, budget=64)
    assert [len(row["teacher_hidden"]) for row in rows] == [len(ids) for ids in RESPONSES]
    for row in rows:
        assert row["teacher_logprobs"] == [[] for _ in row["response_ids"]]
        logprobs = head.logprobs(torch.tensor(row["teacher_hidden"], dtype=torch.float16))
        expected = truth(teacher, row, temperature)
        np.testing.assert_allclose(logprobs, expected, atol=5e-3)  # of float16
        shifted = np.abs(logprobs.numpy()[1:] - expected[:-1])
        assert len(shifted) == 0 or shifted.max() > 0.1, "a shift by one would be seen"


def test_hidden_states_beyond_float16_are_refused_with_what_to_do(tiny_teacher, rollouts):
    large = language(tiny_teacher)
    with torch.no_grad():
        large.model.base_model.norm.weight.mul_(1e6)
    with pytest.raises(ValueError, match=r"beyond float16: set estimator.cache.type = \"poisson"):
        scored(large, rollouts[TeacherHidden()], TeacherHidden())


# The teacher's draws


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_teachers_draws_come_with_its_own_scores_for_any_token_budget(
    student, teacher, temperature
):
    cache = TeacherMultiSample(n=16)
    batch = rollout_batch(student, PROMPTS, RESPONSES, cache)
    for budget in (1, 40, 4096):
        rows = scored(teacher, batch, cache, temperature, budget)
        assert [len(row["teacher_draws"]) for row in rows] == [len(ids) for ids in RESPONSES]
        for row in rows:
            columns = (row["teacher_ids"], row["teacher_draws"], row["teacher_logprobs"])
            tokens = zip(*columns, truth(teacher, row, temperature), strict=True)
            for ids, draws, logprobs, expected in tokens:
                assert len(set(ids)) == len(ids) == len(draws)
                assert min(draws) > 0
                assert sum(draws) == 16
                np.testing.assert_allclose(logprobs, expected[ids], atol=1e-5)


def test_the_teachers_draws_come_as_often_as_its_probabilities_say(student, teacher):
    n = 2**16 - 1  # the most that can be counted
    cache = TeacherMultiSample(n=n)
    batch = rollout_batch(student, [PROMPTS[1]], [RESPONSES[2]], cache)
    (row,) = scored(teacher, batch, cache, temperature=0.7)
    q = np.exp(truth(teacher, row, temperature=0.7).astype(float))
    for ids, draws, expected in zip(row["teacher_ids"], row["teacher_draws"], q, strict=True):
        counts = np.zeros(teacher.vocabulary)
        counts[ids] = draws
        allowed = 5 * np.sqrt(n * expected * (1 - expected)) + 1
        assert np.all(np.abs(counts - n * expected) <= allowed)
    assert np.abs(n * (q[0] - q[1])).max() > 1000, "draws of another token would be found out"


def test_the_teachers_draws_are_new_at_each_token_and_in_each_pass_and_repeat_with_its_seed(
    student, teacher
):
    cache = TeacherMultiSample(n=64)
    twice = rollout_batch(student, [PROMPTS[0]] * 2, [RESPONSES[0]] * 2, cache)

    def draws(seed: int, budget: int) -> list:
        batch, _ = TeacherWorker(teacher, 1.0, budget, seed).score([twice], cache)
        return batch["teacher_draws"].to_pylist()

    for budget in (1, 4096):
        one, other = draws(0, budget)
        assert one != other, "the same tokens, drawn for twice"
        assert draws(0, budget) == [one, other]
        assert draws(1, budget) != [one, other]


# Micro-batches, rows, batches


@each_cache
def test_any_token_budget_gives_the_same_scores(teacher, rollouts, cache):
    alone = scored(teacher, rollouts[cache], cache, budget=1)
    for budget in (40, 90, 4096):
        assert_same_scores(scored(teacher, rollouts[cache], cache, budget=budget), alone)


@each_cache
def test_chosen_rows_are_scored_as_among_all_and_in_the_order_asked(teacher, rollouts, cache):
    everything = scored(teacher, rollouts[cache], cache)
    chosen = scored(teacher, rollouts[cache], cache, rows=[3, 0, 2])
    assert [row["ticket"] for row in chosen] == [3, 0, 2]
    assert_same_scores(chosen, [everything[3], everything[0], everything[2]])


@each_cache
def test_several_batches_become_one_in_order(teacher, rollouts, cache):
    batch = rollouts[cache]
    worker = TeacherWorker(teacher, 1.0, 64)
    merged, report = worker.score([batch.slice(0, 2), batch.slice(2)], cache)
    assert_same_scores(validate(merged, SCORED).to_pylist(), scored(teacher, batch, cache))
    assert [meta.ticket for meta in report.metas] == [0, 1, 2, 3, 4]
    assert [meta.row for meta in report.metas] == [0, 1, 2, 3, 4]


def test_the_rollouts_own_columns_stay_as_they_are(teacher, rollouts):
    batch = rollouts[Poisson(n=16)]
    after, _ = TeacherWorker(teacher, 1.0, 64).score([batch], Poisson(n=16))
    assert after.select(ROLLOUT.names).equals(batch)
    assert after["teacher"].to_pylist() == [teacher.digest] * 5


def test_tokens_without_cached_ids_get_no_scores(teacher, rollouts):
    cache = Sampled()
    emptied = rollouts[cache].to_pylist()
    emptied[0]["cache_ids"][4] = emptied[0]["cache_logprobs"][4] = []
    emptied[1]["cache_ids"][0] = emptied[1]["cache_logprobs"][0] = []  # all there was
    rows = scored(teacher, pa.RecordBatch.from_pylist(emptied, ROLLOUT), cache)
    assert rows[0]["teacher_logprobs"].pop(4) == []
    assert rows[1]["teacher_logprobs"].pop(0) == []
    full = scored(teacher, rollouts[cache], cache)
    full[0]["teacher_logprobs"].pop(4)
    full[1]["teacher_logprobs"].pop(0)
    assert_same_scores(rows, full)


def test_a_prompt_of_another_length_moves_no_score_to_another_token(student, teacher):
    """The same tokens, cut elsewhere into prompt and response, have the same scores."""
    ids = random_ids(30, 5, 50)
    early = rollout_batch(student, [ids[:4]], [ids[4:]], Sampled())
    late = rollout_batch(student, [ids[:20]], [ids[20:]], Sampled())
    (one,) = scored(teacher, early, Sampled())
    (other,) = scored(teacher, late, Sampled())
    np.testing.assert_allclose(
        np.ravel(one["teacher_logprobs"])[16:], np.ravel(other["teacher_logprobs"]), rtol=1e-6
    )


def divergence_of_itself(folder, batch: pa.RecordBatch) -> float:
    """Exact KL per token between a student and a teacher of the same weights."""
    learner = LearnerWorker(language(folder), torch.float32, run_config(folder, folder))
    divergence = learner.divergence([batch], [list(range(batch.num_rows))])
    return divergence.sum() / sum(map(len, RESPONSES))


def test_a_teacher_that_is_the_student_has_divergence_0_and_a_shift_of_the_cache_shows(
    tiny_student, student, rollouts
):
    batch, _ = TeacherWorker(student, 1.0, 64).score([rollouts[Dense()]], Dense())
    assert abs(divergence_of_itself(tiny_student, batch)) < 1e-6
    # Rows moved by one position within each response; the response of one token can't show it.
    columns = batch["teacher_logprobs"].to_pylist()
    shifted = [rows[-1:] + rows[:-1] for rows in columns]
    moved = with_column(batch, "teacher_logprobs", shifted)
    assert divergence_of_itself(tiny_student, moved) > 0.1


def test_the_teacher_needs_no_gradients(tiny_teacher):
    teacher = language(tiny_teacher)
    TeacherWorker(teacher, 1.0, 64)
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())
    assert not teacher.model.training


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_teachers_answers_carry_the_logprobs_that_it_scores_them_with(teacher, temperature):
    worker = TeacherWorker(teacher, temperature, 64)
    prompts = prompt_batch(PROMPTS, first_ticket=-5, answers=["x"] * 5)
    answers, report = worker.answer(prompts, max_new_tokens=20, slots=2, seed=3)
    assert sorted(answers["ticket"].to_pylist()) == [-5, -4, -3, -2, -1]
    assert len(report.metas) == 5
    again, _ = worker.score([answers], Sampled())
    np.testing.assert_allclose(
        again["sampler_logprobs"].flatten().to_numpy(),
        again["teacher_logprobs"].flatten().flatten().to_numpy(),
        atol=1e-4,
    )
    rows = validate(answers, ROLLOUT).to_pylist()
    worst = max(
        np.abs(
            np.array(row["sampler_logprobs"])
            - truth(teacher, row, temperature)[
                np.arange(len(row["response_ids"])), row["response_ids"]
            ]
        ).max()
        for row in rows
    )
    assert worst < 1e-4
    assert all(row["correct"] is not None for row in rows)
