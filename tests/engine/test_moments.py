"""The closed forms against 100,000 draws, on tiny vocabularies where p, p_old and q all differ."""

import math
from dataclasses import replace

import pytest
import torch

from engine.audit import _closed_positions, _exact, _Scene
from engine.config import (
    Clipped,
    Decoupled,
    Dense,
    ForwardKL,
    JensenShannon,
    MultiSample,
    Poisson,
    ReverseKL,
    Sampled,
    StudentTopK,
    TeacherMultiSample,
    TopKTail,
    Unclipped,
)
from engine.estimators import loss_of
from engine.moments import Moments, moments
from engine.support import choose

DRAWS = 100_000


def distribution(size, seed, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(1, size, generator=generator)).log_softmax(-1)


def scene(size, seed) -> _Scene:
    """One position: learner, sampler and teacher disagree."""
    p, p_old, q = (distribution(size, 10 * seed + i) for i in range(3))
    return _Scene(None, 1.0, torch.zeros(1, 1), torch.zeros(1), p, p_old, q, q, 0)  # type: ignore


def drawn_errors(scene, estimator, seed):
    """Squared error of the gradient in every one of DRAWS draws."""
    many = scene[torch.zeros(DRAWS, dtype=torch.long)].double()
    support = many.cached(estimator.cache, torch.Generator().manual_seed(seed))
    estimates, _ = many.logit_gradient(loss_of(estimator), support)
    one, exact = scene.double(), _exact(estimator)
    truth, _ = one.logit_gradient(loss_of(exact), one.cached(exact.cache, torch.Generator()))
    return (estimates - truth).square().sum(1)


ESTIMATORS = [
    ReverseKL(cache=Sampled()),
    ReverseKL(cache=MultiSample(n=1)),
    ReverseKL(cache=MultiSample(n=5)),
    ReverseKL(cache=MultiSample(n=64)),
    ReverseKL(cache=MultiSample(n=1, distinct=True)),
    ReverseKL(cache=MultiSample(n=2, distinct=True)),
    ReverseKL(cache=MultiSample(n=5, distinct=True)),
    ReverseKL(cache=MultiSample(n=64, distinct=True)),
    ReverseKL(cache=Poisson(n=2, alpha=1.0, max_ratio=0)),
    ReverseKL(cache=Poisson(n=3, alpha=0.75, max_ratio=0)),
    ReverseKL(cache=Poisson(n=2, alpha=0.75, max_ratio=0, top_k=2)),
    ReverseKL(cache=Poisson(n=3, alpha=0.75, max_ratio=0.5)),
    ReverseKL(cache=TopKTail(k=2)),
    ReverseKL(cache=TopKTail(k=3, n=3, alpha=0.5)),
    ReverseKL(cache=Poisson(n=3, max_ratio=0), stabiliser=Clipped()),
    ReverseKL(cache=MultiSample(n=4), stabiliser=Decoupled(signal="rollout")),
    ReverseKL(cache=Sampled(), stabiliser=Unclipped(ratio=False)),
    ForwardKL(cache=TeacherMultiSample(n=4)),
    JensenShannon(beta=0.3, cache=Poisson(n=2, max_ratio=0)),
]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=str)
def test_the_error_of_a_position_is_that_of_100000_draws(estimator, seed):
    here = scene(7, seed)
    drawn = drawn_errors(here, estimator, seed)
    closed = _closed_positions(here, estimator)[0].squared_error.item()
    uncertainty = drawn.std().item() / math.sqrt(DRAWS)
    assert uncertainty < 0.04 * closed, "the draws say nothing"
    assert abs(drawn.mean().item() - closed) < 4 * uncertainty


def test_a_cap_adds_its_bias_and_nothing_else_does():
    here = scene(7, 1)
    capped = _closed_positions(here, ReverseKL(cache=Poisson(n=3, max_ratio=0.5)))[0]
    assert capped.squared_bias.item() > 1e-3
    for estimator in ESTIMATORS[:11] + ESTIMATORS[12:14] + ESTIMATORS[-2:]:
        errors = _closed_positions(here, estimator)[0]
        assert errors.squared_bias.item() < 1e-12, str(estimator)


def test_what_is_kept_is_what_is_cached():
    here = scene(7, 2)
    for estimator in ESTIMATORS:
        *_, kept, covered = _closed_positions(here, estimator)
        many = here[torch.zeros(DRAWS, dtype=torch.long)]
        support = many.cached(estimator.cache, torch.Generator().manual_seed(3))
        assert kept == pytest.approx(len(support.ids) / DRAWS, rel=0.01)
        mass = support.gather(many.log_p).exp().sum().item() / DRAWS
        assert covered == pytest.approx(mass, rel=0.02)


# Covariances, entry by entry


def covariance(counts: Moments) -> torch.Tensor:
    """[V, V], of the one row, as the module's docstring states it."""
    pi, p, n = counts.coins[0], counts.drawn[0], counts.draws
    if counts.distinct:
        both = (1 - p[:, None] - p[None]).double() ** n - torch.outer((1 - p) ** n, (1 - p) ** n)
        drawn = both - both.diag().diag() + ((1 - p) ** n - (1 - p) ** (2 * n)).diag()
    else:
        drawn = n * (p.diag() - torch.outer(p, p))
    return (pi * (1 - pi)).diag() + drawn


CACHES = [estimator.cache for estimator in ESTIMATORS]


def repeated(counts: Moments) -> Moments:
    return replace(
        counts, coins=counts.coins.expand(DRAWS, -1), drawn=counts.drawn.expand(DRAWS, -1)
    )


@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_the_counts_of_100000_draws_have_the_stated_covariance(cache):
    logprobs = distribution(5, 4)
    counts = moments(cache, logprobs)
    many = logprobs.expand(DRAWS, -1)
    emitted = torch.multinomial(logprobs.exp()[0], DRAWS, replacement=True)
    chosen = choose(cache, many, emitted, torch.Generator().manual_seed(0))
    how_often = torch.ones_like(chosen.ids)
    if len(chosen.draws) and not counts.distinct:
        how_often = torch.where(chosen.draws > 0, chosen.draws, 1)
    owner = torch.repeat_interleave(chosen.counts)
    drawn = torch.zeros(DRAWS, 5, dtype=torch.float64)
    drawn[owner, chosen.ids] = how_often.double()
    tolerance = 0.02 * max(1, counts.draws if not counts.distinct else 1)
    torch.testing.assert_close(drawn.mean(0), counts.mean[0], atol=tolerance, rtol=0)
    torch.testing.assert_close(drawn.T.cov(), covariance(counts), atol=tolerance, rtol=0)


@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_probes_have_the_covariance_of_the_counts_and_mean_zero(cache):
    counts = moments(cache, distribution(5, 4))
    probes = repeated(counts).probe(torch.Generator().manual_seed(0))
    expected = covariance(counts)
    scale = max(expected.diag().max().item(), 1e-3)
    assert probes.mean(0).abs().max() < 0.02 * math.sqrt(scale)
    torch.testing.assert_close(probes.T.cov(), expected, atol=0.02 * scale, rtol=0)


@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_the_variance_is_the_trace_over_that_covariance(cache):
    """To rounding, also where one id is nearly certain and others are next to impossible."""
    for logprobs in (distribution(9, 5), distribution(9, 6, 12.0)):
        counts = moments(cache, logprobs)
        learner = distribution(9, 7).double().exp()
        slopes = torch.randn(1, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        directions = torch.diag(slopes[0]) @ (torch.eye(9, dtype=torch.float64) - learner)
        expected = (covariance(counts) * (directions @ directions.T)).sum()
        variance = counts.variance(slopes, learner)[0]
        torch.testing.assert_close(variance, expected, rtol=1e-9, atol=1e-13)


def test_distinct_draws_are_not_coins():
    """What a formula for independent ids would say is far off."""
    here = scene(4, 0)
    estimator = ReverseKL(cache=MultiSample(n=3, distinct=True))
    part = here.double()
    counts = moments(estimator.cache, here.log_p_old)
    slopes = part.slopes(loss_of(estimator), estimator.cache)
    coins = Moments(counts.mean, torch.zeros_like(counts.mean)).variance(slopes, part.log_p.exp())
    drawn = drawn_errors(here, estimator, 0)
    assert abs(drawn.mean().item() - coins.item()) > 10 * drawn.std().item() / math.sqrt(DRAWS)


def test_an_id_that_is_almost_never_drawn_keeps_its_error():
    """p_old = e^-45 and p = 0.1: a weight of e^43 at a probability that float64 rounds away from 1,
    and an error of p^2 A^2 / (n p_old)."""
    p_old = torch.tensor([[-45.0, math.log(0.6), math.log(0.4)]])
    p, q = (torch.tensor([x]).log() for x in ([0.1, 0.5, 0.4], [0.3, 0.4, 0.3]))
    here = _Scene(None, 1.0, torch.zeros(1, 1), torch.zeros(1), p, p_old, q, q, 0)  # type: ignore
    expected = 0.1**2 * math.log(3) ** 2 * (0.9**2 + 0.5**2 + 0.4**2) / (8 * math.exp(-45))
    for distinct in (False, True):
        cache = MultiSample(n=8, distinct=distinct)
        errors = _closed_positions(here, ReverseKL(cache=cache))[0]
        assert errors.squared_error.item() == pytest.approx(expected, rel=1e-5)


def test_a_cache_that_draws_nothing_has_no_moments():
    for cache in (Dense(), StudentTopK()):
        assert moments(cache, distribution(5, 0)) is None
