"""The audit against enumeration and a plain backward pass, on the tiny models."""

import itertools
from dataclasses import replace

import pytest
import torch

from engine.audit import (
    _closed_batch,
    _closed_positions,
    _drawn_batch,
    _Scene,
    alternatives,
    audit,
    entry_bytes,
    label,
    recommended,
)
from engine.config import (
    M2PO,
    Clipped,
    Dense,
    ForwardKL,
    JensenShannon,
    MultiSample,
    Poisson,
    ReverseKL,
    Sampled,
    StudentTopK,
    TeacherTopK,
    TopKTail,
)
from engine.estimators import loss_of
from engine.models import Language
from engine.moments import moments
from engine.prompts import Prompt, to_batch
from engine.rollout import RolloutWorker
from tests.engine.test_moments import covariance
from tests.engine.tiny import language, next_logprobs, random_ids

EXACT = ReverseKL(cache=Dense())
PROMPTS = [Prompt(f"p{i}", str(i), random_ids(6, i, 50), None, None) for i in range(12)]


@pytest.fixture(scope="module")
def student(tiny_student) -> Language:
    return language(tiny_student)


@pytest.fixture(scope="module")
def teacher(tiny_teacher) -> Language:
    return language(tiny_teacher)


def audited(student, sampler, teacher, *estimators, **options):
    options = {"max_new_tokens": 8, "responses_per_update": 12} | options
    return audit(student, sampler, teacher, PROMPTS, estimators, **options)


@pytest.fixture(scope="module")
def scene(student, teacher) -> _Scene:
    """Positions of stale responses: the sampler is the teacher."""
    worker = RolloutWorker(teacher.sampler(1.0, 8), teacher.decode, Sampled(), 8, seed=0)
    batch, _ = worker.generate(to_batch(PROMPTS, range(12), [0] * 12))
    return _Scene.of(student, teacher, teacher, batch, (1.0, 1.0))


def test_the_exact_loss_has_no_error(student, teacher):
    row = audited(student, student, teacher, ReverseKL(cache=Dense())).rows[0]
    assert row.mse == pytest.approx(0, abs=1e-10) and row.batch_mse == pytest.approx(0, abs=1e-10)
    assert row.cosine == pytest.approx(1) and row.batch_cosine == pytest.approx(1)
    assert row.bias == pytest.approx(0, abs=1e-5) and row.tail_mass == pytest.approx(0, abs=1e-5)
    assert row.bytes_per_token == 4 * student.vocabulary


def test_the_error_of_one_sampled_token_is_the_enumerated_one(student, teacher):
    """Over all emitted tokens, at every position, with its probability."""
    report = audited(student, student, teacher, ReverseKL(cache=Sampled()))
    worker = RolloutWorker(student.sampler(1.0, 128), student.decode, Sampled(), 8, seed=0)
    batch, _ = worker.generate(to_batch(PROMPTS, range(12), [0] * 12))
    scene = _Scene.of(student, student, teacher, batch, (1.0, 1.0))
    p, a = scene.log_p.exp(), scene.log_q - scene.log_p
    exact = p * (-(a) + (p * a).sum(1, keepdim=True))
    error = norm = 0.0
    eye = torch.eye(p.shape[1])
    for t in range(len(p)):
        estimates = -a[t][:, None] * (eye - p[t])  # row y: the gradient if y was emitted
        error += (p[t] * (estimates - exact[t]).square().sum(1)).sum().item()
        norm += exact[t].square().sum().item()
    assert report.rows[0].mse == pytest.approx(error / norm, rel=1e-4)
    assert report.rows[0].bias < 1e-5 and not report.rows[0].drawn


def test_the_batchs_gradient_is_a_plain_backward_pass(student, teacher):
    worker = RolloutWorker(student.sampler(1.0, 128), student.decode, Sampled(), 8, seed=0)
    batch, _ = worker.generate(to_batch(PROMPTS, range(12), [0] * 12))
    scene = _Scene.of(student, student, teacher, batch, (1.0, 1.0))
    exact = ReverseKL(cache=Dense())
    gradient = scene.parameter_gradient(
        loss_of(exact), scene.cached(exact.cache, torch.Generator())
    )
    total = torch.zeros(())
    tokens = 0
    for row in batch.to_pylist():
        ids, start = row["prompt_ids"] + row["response_ids"], len(row["prompt_ids"]) - 1
        log_p = next_logprobs(student.model, ids, student.vocabulary)[start:-1]
        with torch.no_grad():
            log_q = next_logprobs(teacher.model, ids, teacher.vocabulary)[start:-1]
        total = total + (log_p.exp() * (log_p - log_q)).sum()
        tokens += len(log_p)
    expected = torch.autograd.grad(total / tokens, list(student.model.parameters()))
    flat = torch.cat([g.reshape(-1) for g in expected])
    torch.testing.assert_close(gradient, flat, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("stale", [False, True])
def test_hidden_states_have_no_error_but_their_rounding_however_old(student, teacher, stale):
    sampler = teacher if stale else student
    row, exact = audited(
        student, sampler, teacher, ReverseKL(), ReverseKL(cache=Dense()), repeats=1
    ).rows
    assert 0 < row.mse < 1e-5 and row.batch_mse < 1e-5
    assert exact.mse == 0
    assert row.bytes_per_token == 2 * teacher.model.config.hidden_size


def test_a_truncated_support_shows_its_bias_and_an_unbiased_cache_does_not(student, teacher):
    biased, unbiased = audited(
        student,
        teacher,
        teacher,
        ReverseKL(cache=StudentTopK(k=4)),
        ReverseKL(cache=Poisson(n=64, alpha=0.75, max_ratio=0)),
        repeats=32,
    ).rows
    assert biased.bias > 0.1 and biased.batch_bias > 0.1
    assert unbiased.bias < 0.05 and unbiased.batch_bias < 0.05
    assert biased.tail_mass > 0.01


def test_more_draws_have_less_error_and_cost_more(student, teacher):
    rows = audited(
        student, student, teacher, *(ReverseKL(cache=MultiSample(n=n)) for n in (1, 4, 16))
    ).rows
    for less, more in itertools.pairwise(rows):
        assert more.mse < less.mse and more.batch_mse < less.batch_mse
        assert more.cosine > less.cosine
        assert more.bytes_per_token > less.bytes_per_token
    assert rows[0].bytes_per_token == 14


def test_drift_is_zero_for_the_student_itself_and_not_for_another(student, teacher):
    estimator = ReverseKL(cache=Sampled())
    assert audited(student, student, teacher, estimator, repeats=1).drift == pytest.approx(0)
    assert audited(student, teacher, teacher, estimator, repeats=1).drift > 0.01


def test_positions_are_as_many_as_asked_for(student, teacher):
    report = audited(student, student, teacher, ReverseKL(cache=Sampled()), positions=10)
    assert report.positions == 10
    assert audited(student, student, teacher, ReverseKL(cache=Sampled())).positions > 20


@pytest.mark.parametrize(
    "estimator",
    [
        ForwardKL(cache=TeacherTopK(k=4)),
        JensenShannon(cache=Poisson(n=16)),
        ReverseKL(cache=TopKTail(k=30), stabiliser=Clipped()),
    ],
    ids=lambda e: e.type,
)
def test_each_kind_of_estimator_is_compared_with_its_own_divergence(student, teacher, estimator):
    row = audited(student, student, teacher, estimator).rows[0]
    assert row.cosine > 0.5 and 0 < row.mse < 2


@pytest.mark.parametrize(
    "cache",
    [
        Poisson(n=16, alpha=1.0, max_ratio=0),
        Sampled(),
        MultiSample(n=4),
        MultiSample(n=4, distinct=True),
        TopKTail(k=8),
    ],
    ids=lambda c: c.type,
)
def test_the_error_of_a_batch_is_the_trace_of_its_exact_covariance(scene, cache):
    """J Cov J^T of each position, by a backward pass for every logit, then summed: positions are
    independent."""
    estimator, part = ReverseKL(cache=cache), scene.take(6, 0)
    counts = moments(cache, part.log_p_old)
    _, slopes, *_ = _closed_positions(part, estimator)
    ids = torch.eye(part.vocabulary, dtype=torch.float64)
    expected = 0.0
    for row in range(len(part.log_p)):
        one = part[torch.tensor([row])]
        jacobian = torch.stack([one.parameter_gradient_of(i[None]) for i in ids]).double()
        overlaps = jacobian @ jacobian.T * torch.outer(slopes[row], slopes[row])
        columns = [x[row : row + 1] for x in (counts.coins, counts.drawn)]
        expected += (
            covariance(replace(counts, coins=columns[0], drawn=columns[1])) * overlaps
        ).sum()
    expected = expected.item() / len(part.log_p) ** 2
    truth, generator = part.exact_gradient(EXACT), torch.Generator().manual_seed(0)
    batch = _closed_batch(part, cache, truth, slopes, True, 300, generator)
    assert batch.squared_error.item() == pytest.approx(expected, rel=0.1)
    assert batch.squared_bias.item() < 1e-6 * expected


def test_draws_of_a_batch_agree_with_its_closed_form(scene):
    estimator = ReverseKL(cache=MultiSample(n=16))
    scene = replace(scene, log_p_old=scene.log_p.detach())  # of stale ones draws see too little
    _, slopes, *_ = _closed_positions(scene, estimator)
    truth, generator = scene.exact_gradient(EXACT), torch.Generator().manual_seed(0)
    closed = _closed_batch(scene, estimator.cache, truth, slopes, False, 100, generator)
    drawn = _drawn_batch(scene, estimator, truth, 400, generator)
    error = closed.squared_error.item()
    assert drawn.squared_error.item() == pytest.approx(error, rel=0.1)
    assert drawn.cosine == pytest.approx(closed.cosine, abs=0.02)


def test_only_where_ids_change_each_others_weight_is_the_cache_drawn(student, teacher):
    rows = audited(
        student,
        teacher,
        teacher,
        *(ReverseKL(cache=Sampled(), stabiliser=s) for s in (M2PO(), Clipped())),
        ReverseKL(cache=StudentTopK()),
    ).rows
    assert [row.drawn for row in rows] == [True, False, False]


def test_a_position_that_dominates_the_error_is_told(student, teacher):
    report = audited(student, student, teacher, ReverseKL(cache=Sampled()), positions=30)
    calm = replace(report, rows=[replace(report.rows[0], worst=0.1)])
    assert calm.warnings == []
    loud = [replace(report.rows[0], worst=0.66, drawn=drawn) for drawn in (False, True)]
    closed, drawn = replace(report, rows=loud).warnings
    assert "sampled 66%" in closed and "raise --responses and --positions" in closed
    assert "sampled 66%" in drawn and "raise --repeats" in drawn
    alone = audited(student, student, teacher, ReverseKL(cache=Sampled()), positions=1)
    assert alone.rows[0].worst == pytest.approx(1) and alone.warnings


def test_a_cache_of_the_scene_is_drawn_from_the_sampler(scene):
    support = scene.cached(MultiSample(n=8), torch.Generator().manual_seed(0))
    torch.testing.assert_close(support.sampler_logprobs, support.gather(scene.log_p_old))
    torch.testing.assert_close(support.teacher_logprobs, support.gather(scene.log_q))
    torch.testing.assert_close(support.proximal_logprobs, support.gather(scene.log_p))
    assert support.sum(support.draws.float()).tolist() == [8] * len(scene.log_p)


def row(name, size, mse, bias=0.0):
    from engine.audit import Audit

    return Audit(name, size, 1, 0, mse, bias, 1, mse, mse, mse, bias, 1, 0.1, False)


def test_the_cheapest_estimator_well_below_the_noise_is_recommended():
    rows = [row("exact", 400, 0), row("good", 30, 0.09), row("small", 10, 0.5)]
    assert recommended(rows, noise=1.0, shrink=1.0) == "good"
    assert recommended(rows, noise=0.01, shrink=1.0) == "exact"
    assert recommended(rows[1:], noise=0.01, shrink=1.0) == ""
    # In an update of ten times as many positions variance falls tenfold; bias would stay.
    assert recommended(rows, noise=1.0, shrink=0.1) == "small"
    rows[-1] = row("small", 10, 0.5, bias=0.6)
    assert recommended(rows, noise=1.0, shrink=0.1) == "good"


@pytest.mark.parametrize(
    "estimator, name",
    [
        (ReverseKL(cache=Sampled()), "sampled"),
        (ReverseKL(cache=MultiSample(n=16, distinct=True)), "multi_sample(16, distinct)"),
        (ReverseKL(cache=Poisson(n=8, max_ratio=3.0)), "poisson(8, 0.75, cap=3)"),
        (ReverseKL(cache=Poisson(n=8, max_ratio=0)), "poisson(8, 0.75, uncapped)"),
        (ReverseKL(cache=TopKTail(k=4)), "top_k_tail(4)"),
        (
            ReverseKL(cache=StudentTopK(k=4, rest="renormalise")),
            "student_top_k(4, rest=renormalise)",
        ),
        (ReverseKL(cache=Sampled(), stabiliser=Clipped()), "sampled + clip"),
        (
            ReverseKL(cache=Sampled(), stabiliser=Clipped(signal="rollout", eps=0.1)),
            "sampled + clip, signal=rollout, eps=0.1",
        ),
    ],
)
def test_names_say_what_differs(estimator, name):
    assert label(estimator) == name


@pytest.mark.parametrize("kind", [ReverseKL, ForwardKL, JensenShannon])
def test_alternatives_begin_with_the_estimator_in_use_and_name_each_once(kind):
    others = alternatives(kind())
    assert others[0] == kind()
    names = [label(other) for other in others]
    assert len(set(names)) == len(names) > 5


def test_an_entry_costs_its_columns():
    assert entry_bytes(Sampled()) == 12 and entry_bytes(MultiSample()) == 14
    assert entry_bytes(TeacherTopK()) == 8 and entry_bytes(Dense()) == 4
