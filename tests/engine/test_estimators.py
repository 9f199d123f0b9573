"""The losses against their definitions.

Expectations are enumerated, never sampled: each possible cache is one token of a batch, and its
probability weighs that token's loss.
"""

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.config import (
    M2PO,
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
    TeacherTopK,
    TopKTail,
    Unclipped,
    chosen_by_teacher,
)
from engine.estimators import loss_of, m2po_bound, proximal_logprobs
from engine.support import Chosen, Support, choose

POISSONS = [(1, 1.0), (3, 1.0), (8, 0.75), (40, 0.5)]  # none to several ids kept for certain
SAMPLED, DENSE = ReverseKL(cache=Sampled()), ReverseKL(cache=Dense())
FORWARD_DENSE = ForwardKL(cache=Dense())
ESTIMATORS = {
    "sampled": SAMPLED,
    "multi_sample": ReverseKL(cache=MultiSample(n=6)),
    "distinct multi_sample": ReverseKL(cache=MultiSample(n=6, distinct=True)),
    "poisson": ReverseKL(cache=Poisson(n=8, alpha=0.75, max_ratio=0)),
    "capped poisson": ReverseKL(cache=Poisson(n=8, alpha=0.75, max_ratio=1.5)),
    "forced poisson": ReverseKL(cache=Poisson(n=8, alpha=0.75, top_k=2, max_ratio=0)),
    "top_k_tail": ReverseKL(cache=TopKTail(k=3)),
    "thinned top_k_tail": ReverseKL(cache=TopKTail(k=6, n=4)),
    "student_top_k": ReverseKL(cache=StudentTopK(k=3)),
    "renormalised student_top_k": ReverseKL(cache=StudentTopK(k=3, rest="renormalise")),
    "dense": DENSE,
    "teacher_top_k": ForwardKL(cache=TeacherTopK(k=3)),
    "teacher_multi_sample": ForwardKL(cache=TeacherMultiSample(n=6)),
    "forward dense": FORWARD_DENSE,
    "jsd poisson": JensenShannon(beta=0.3, cache=Poisson(n=8, alpha=0.75, max_ratio=0)),
    "jsd teacher_top_k": JensenShannon(beta=0.3, cache=TeacherTopK(k=3)),
    "jsd student_top_k": JensenShannon(beta=0.3, cache=StudentTopK(k=3)),
    "jsd dense": JensenShannon(beta=0.3, cache=Dense()),
    "clipped": ReverseKL(cache=MultiSample(n=6), stabiliser=Clipped()),
    "frozen signal": ReverseKL(cache=Sampled(), stabiliser=Unclipped(signal="rollout")),
    "no ratio": ReverseKL(cache=Sampled(), stabiliser=Unclipped(ratio=False)),
    "decoupled": ReverseKL(cache=Poisson(n=8, max_ratio=0), stabiliser=Decoupled()),
    "m2po": ReverseKL(cache=Poisson(n=8, max_ratio=0), stabiliser=M2PO()),
}
each_estimator = pytest.mark.parametrize("name", ESTIMATORS)
# Those whose gradient is 0 where student and teacher agree. Not so the teacher's draws, whose
# gradient is 0 in expectation only, and a signal frozen when the student was another.
each_zero_estimator = pytest.mark.parametrize(
    "name", [name for name in ESTIMATORS if name not in ("teacher_multi_sample", "frozen signal")]
)


def poisson(n, alpha, max_ratio=0):
    return ReverseKL(cache=Poisson(n=n, alpha=alpha, max_ratio=max_ratio))


def distributions(seed: int, vocabulary: int, rows: int = 1, scale: float = 1.5):
    """Logits of the learner, log-probabilities of a stale sampler and of a teacher."""
    generator = torch.Generator().manual_seed(seed)
    z, drift, teacher = scale * torch.randn(
        3, rows, vocabulary, generator=generator, dtype=torch.float64
    )
    return z.requires_grad_(), (z.detach() + drift).log_softmax(-1), teacher.log_softmax(-1)


def ragged(
    kept: list[list[int]],
    p_old: Tensor,
    q: Tensor,
    tokens: list[int] | None = None,
    draws: list[list[int]] | None = None,
):
    """The cache in which token i owns the ids kept[i], drawn draws[i] times."""
    tokens = tokens or [0] * len(kept)
    rows = torch.tensor([i for i, ids in enumerate(kept) for _ in ids], dtype=torch.int64)
    ids = torch.tensor([a for ids in kept for a in ids], dtype=torch.int64)
    token_ids = torch.tensor(tokens, dtype=torch.int64)
    return Support(
        offsets=torch.tensor([0, *itertools.accumulate(len(ids) for ids in kept)]),
        ids=ids,
        sampler_logprobs=p_old[rows, ids],
        teacher_logprobs=q[rows, ids],
        token_ids=token_ids,
        token_sampler_logprobs=p_old[torch.arange(len(kept)), token_ids],
        draws=torch.tensor([c for counts in draws or [] for c in counts], dtype=torch.int64),
        # A policy between sampler and learner would do as well; nothing here depends on which.
        proximal_logprobs=p_old[rows, ids],
    )


def counted(drawn: list[tuple[int, ...]], p_old: Tensor, q: Tensor):
    """The cache of these draws with replacement, one tuple for each token, its first emitted."""
    counts = [Counter(ids) for ids in drawn]
    n = len(drawn)
    return ragged(
        [list(c) for c in counts],
        repeat(p_old, n),
        repeat(q, n),
        [ids[0] for ids in drawn],
        [list(c.values()) for c in counts],
    )


def dense(p_old: Tensor, q: Tensor, tokens: list[int] | None = None):
    """The cache of the whole vocabulary."""
    n, vocabulary = q.shape
    empty = ragged([[] for _ in range(n)], p_old, q, tokens)
    return Support(
        offsets=torch.arange(n + 1) * vocabulary,
        ids=empty.ids,
        sampler_logprobs=empty.sampler_logprobs,
        teacher_logprobs=q.reshape(-1),
        token_ids=empty.token_ids,
        token_sampler_logprobs=empty.token_sampler_logprobs,
    )


def of_chosen(kept: Chosen, p_old: Tensor, q: Tensor, tokens: list[int] | None = None):
    """The cache of the ids that a model chose."""
    sizes = kept.counts.tolist()
    ids = [part.tolist() for part in kept.ids.split(sizes)]
    draws = [part.tolist() for part in kept.draws.split(sizes)] if len(kept.draws) else None
    return ragged(ids, p_old, q, tokens, draws)


def teacher_chosen(k: int, p_old: Tensor, q: Tensor):
    """Without log p_old of the ids, which the sampler didn't know of."""
    support = of_chosen(choose(TeacherTopK(k=k), q), p_old, q)
    nothing = torch.zeros(0)
    columns = vars(support) | {"sampler_logprobs": nothing, "proximal_logprobs": nothing}
    return Support(**columns)


def cache_for(estimator, p_old: Tensor, q: Tensor, seed: int = 0):
    """A random cache, as sampler and teacher would fill it."""
    generator = torch.Generator().manual_seed(seed)
    emitted = torch.multinomial(p_old.exp(), 1, generator=generator).squeeze(1)
    if isinstance(estimator.cache, Dense):
        return dense(p_old, q, emitted.tolist())
    if isinstance(estimator.cache, TeacherTopK):
        return teacher_chosen(estimator.cache.k, p_old, q)
    chooser = q if chosen_by_teacher(estimator.cache) else p_old
    return of_chosen(
        choose(estimator.cache, chooser, emitted, generator), p_old, q, emitted.tolist()
    )


def repeat(logprobs: Tensor, times: int):
    return logprobs.expand(times, -1)


def gradient(value: Tensor, z: Tensor):
    return torch.autograd.grad(value, z, retain_graph=True)[0]


def exact_reverse(z: Tensor, q: Tensor):
    log_p = z.log_softmax(-1)
    return (log_p.exp() * (log_p - q)).sum()


def exact_forward(z: Tensor, q: Tensor):
    return (q.exp() * (q - z.log_softmax(-1))).sum()


def exact_jsd(z: Tensor, q: Tensor, beta: float):
    p, q = z.softmax(-1), q.exp()
    m = beta * q + (1 - beta) * p
    return (beta * q * (q / m).log() + (1 - beta) * p * (p / m).log()).sum()


def inclusion(p_old: Tensor, n: int, alpha: float):
    """min(1, (n p_old)^alpha), written down a second time."""
    return torch.minimum(torch.ones_like(p_old), (n * p_old.exp()) ** alpha)


def all_supports(p_old: Tensor, n: int, alpha: float):
    """Every set of ids that `poisson` can keep, and its probability."""
    pi = inclusion(p_old, n, alpha).squeeze(0).tolist()
    sets = [
        [a for a, inside in enumerate(choice) if inside]
        for choice in itertools.product([False, True], repeat=len(pi))
    ]
    odds = [math.prod(x if a in s else 1 - x for a, x in enumerate(pi)) for s in sets]
    return sets, torch.tensor(odds, dtype=p_old.dtype)


def expectation(loss, z: Tensor, support: Support, odds: Tensor):
    """Of the loss, over caches with these probabilities."""
    losses, _ = loss(repeat(z.log_softmax(-1), len(support)), support)
    return (odds * losses).sum()


def assert_unbiased(estimator, z: Tensor, support: Support, odds: Tensor, exact: Tensor):
    """Value and gradient, in expectation over all caches."""
    assert odds.sum().item() == pytest.approx(1)
    expected = expectation(loss_of(estimator), z, support, odds)
    torch.testing.assert_close(expected, exact, atol=1e-9, rtol=0)
    torch.testing.assert_close(gradient(expected, z), gradient(exact, z), atol=1e-9, rtol=0)


def all_draws(logprobs: Tensor, n: int):
    """Every outcome of n draws with replacement, and its probability."""
    drawn = list(itertools.product(range(logprobs.shape[1]), repeat=n))
    odds = logprobs.squeeze(0)[torch.tensor(drawn)].sum(1).exp()
    return drawn, odds


def expected_poisson(loss, z: Tensor, p_old: Tensor, q: Tensor, n: int, alpha: float):
    """The expectation of the loss over all caches."""
    sets, odds = all_supports(p_old, n, alpha)
    support = ragged(sets, repeat(p_old, len(sets)), repeat(q, len(sets)))
    losses = loss(repeat(z.log_softmax(-1), len(sets)), support)
    return (odds * (losses[0] if isinstance(losses, tuple) else losses)).sum()


# Reverse KL is unbiased, however stale the sampler


@pytest.mark.parametrize("vocabulary", [7, 50])
@pytest.mark.parametrize("seed", range(3))
def test_sampled_has_the_dense_value_and_gradient_in_expectation(seed, vocabulary):
    z, p_old, q = distributions(seed, vocabulary)
    every_id = [[a] for a in range(vocabulary)]
    support = ragged(every_id, repeat(p_old, vocabulary), repeat(q, vocabulary))
    losses, _ = loss_of(SAMPLED)(repeat(z.log_softmax(-1), vocabulary), support)
    expected = (p_old.exp().squeeze(0) * losses).sum()
    torch.testing.assert_close(expected, exact_reverse(z, q), atol=1e-9, rtol=0)
    torch.testing.assert_close(
        gradient(expected, z), gradient(exact_reverse(z, q), z), atol=1e-9, rtol=0
    )


@pytest.mark.parametrize("n, alpha", POISSONS)
@pytest.mark.parametrize("seed", range(3))
def test_poisson_has_the_dense_value_and_gradient_over_all_supports(seed, n, alpha):
    z, p_old, q = distributions(seed, 7)
    expected = expected_poisson(loss_of(poisson(n, alpha)), z, p_old, q, n, alpha)
    torch.testing.assert_close(expected, exact_reverse(z, q), atol=1e-9, rtol=0)
    torch.testing.assert_close(
        gradient(expected, z), gradient(exact_reverse(z, q), z), atol=1e-9, rtol=0
    )


@pytest.mark.parametrize("n, alpha", POISSONS)
def test_poisson_has_the_dense_gradient_over_fifty_ids(n, alpha):
    # The loss is a sum over kept ids, and id a is kept with probability pi(a):
    # its expectation is sum_a pi(a) loss({a}).
    z, p_old, q = distributions(5, 50)
    support = ragged([[a] for a in range(50)], repeat(p_old, 50), repeat(q, 50))
    losses, _ = loss_of(poisson(n, alpha))(repeat(z.log_softmax(-1), 50), support)
    expected = (inclusion(p_old, n, alpha).squeeze(0) * losses).sum()
    torch.testing.assert_close(
        gradient(expected, z), gradient(exact_reverse(z, q), z), atol=1e-9, rtol=0
    )


@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize("vocabulary, n", [(7, 1), (7, 3), (3, 6)])
def test_draws_have_the_dense_value_and_gradient_over_all_outcomes(vocabulary, n, distinct):
    z, p_old, q = distributions(vocabulary + n, vocabulary)
    drawn, odds = all_draws(p_old, n)
    estimator = ReverseKL(cache=MultiSample(n=n, distinct=distinct))
    assert_unbiased(estimator, z, counted(drawn, p_old, q), odds, exact_reverse(z, q))


def test_distinct_draws_have_less_variance_than_counted_ones():
    z, p_old, q = distributions(3, 4)
    drawn, odds = all_draws(p_old, 5)
    every_z = repeat(z, len(drawn)).detach().requires_grad_()
    exact = gradient(exact_reverse(z, q), z)

    def error(distinct):
        loss = loss_of(ReverseKL(cache=MultiSample(n=5, distinct=distinct)))
        losses, _ = loss(every_z.log_softmax(-1), counted(drawn, p_old, q))
        return (odds * (gradient(losses.sum(), every_z) - exact).square().sum(1)).sum()

    assert error(distinct=True) < error(distinct=False)


def tops_and_tails(k: int, p_old: Tensor, q: Tensor):
    """Every cache of top_k_tail, one for each emitted token, and its probability."""
    vocabulary = p_old.shape[1]
    emitted = torch.arange(vocabulary)
    kept = choose(TopKTail(k=k), repeat(p_old, vocabulary), emitted)
    rows = repeat(p_old, vocabulary), repeat(q, vocabulary)
    return of_chosen(kept, *rows, emitted.tolist()), p_old.exp().squeeze(0)


@pytest.mark.parametrize("k", [1, 4, 16, 40])
@pytest.mark.parametrize("seed", range(3))
def test_top_k_tail_has_the_dense_value_and_gradient_over_all_emitted_tokens(seed, k):
    z, p_old, q = distributions(seed, 40)
    support, odds = tops_and_tails(k, p_old, q)
    assert_unbiased(ReverseKL(cache=TopKTail(k=k)), z, support, odds, exact_reverse(z, q))


@pytest.mark.parametrize("n, alpha", POISSONS)
def test_a_thinned_top_with_its_tail_has_the_dense_value_and_gradient(n, alpha):
    z, p_old, q = distributions(2, 6)
    top = p_old.topk(4).indices.squeeze(0).tolist()
    sets, set_odds = all_supports(p_old[:, top], n, alpha)
    kept, draws, tokens, odds = [], [], [], []
    for y, (chosen, chance) in itertools.product(range(6), zip(sets, set_odds, strict=True)):
        outside = [y] if y not in top else []
        kept.append([top[i] for i in chosen] + outside)
        draws.append([0] * len(chosen) + [1] * len(outside))
        tokens.append(y)
        odds.append(chance * p_old[0, y].exp())
    support = ragged(kept, repeat(p_old, len(kept)), repeat(q, len(kept)), tokens, draws)
    estimator = ReverseKL(cache=TopKTail(k=4, n=n, alpha=alpha))
    assert_unbiased(estimator, z, support, torch.stack(odds), exact_reverse(z, q))


@pytest.mark.parametrize("n, alpha", POISSONS)
def test_poisson_with_forced_ids_has_the_dense_value_and_gradient(n, alpha):
    z, p_old, q = distributions(4, 7)
    order = p_old.squeeze(0).argsort(descending=True).tolist()
    forced, others = order[:2], order[2:]
    sets, odds = all_supports(p_old[:, others], n, alpha)
    kept = [forced + [others[i] for i in chosen] for chosen in sets]
    support = ragged(kept, repeat(p_old, len(kept)), repeat(q, len(kept)))
    estimator = ReverseKL(cache=Poisson(n=n, alpha=alpha, top_k=2, max_ratio=0))
    assert_unbiased(estimator, z, support, odds, exact_reverse(z, q))


@pytest.mark.parametrize("vocabulary, n", [(7, 1), (5, 3)])
def test_the_teachers_draws_have_the_dense_forward_value_and_gradient(vocabulary, n):
    z, p_old, q = distributions(6, vocabulary)
    drawn, odds = all_draws(q, n)
    estimator = ForwardKL(cache=TeacherMultiSample(n=n))
    assert_unbiased(estimator, z, counted(drawn, p_old, q), odds, exact_forward(z, q))


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("n, alpha", POISSONS)
def test_poisson_has_the_dense_jensen_shannon_value_and_gradient(n, alpha, beta):
    z, p_old, q = distributions(7, 7)
    sets, odds = all_supports(p_old, n, alpha)
    support = ragged(sets, repeat(p_old, len(sets)), repeat(q, len(sets)))
    exact = exact_jsd(z, q, beta) if beta < 1 else exact_reverse(z, q)
    estimator = JensenShannon(beta=beta, cache=Poisson(n=n, alpha=alpha, max_ratio=0))
    assert_unbiased(estimator, z, support, odds, exact)


# What the field does instead is biased, and the same enumeration shows it


def bias(loss, z: Tensor, support: Support, odds: Tensor, exact: Tensor) -> float:
    """Of the gradient, relative to its norm."""
    slope = gradient(exact, z)
    return ((gradient(expectation(loss, z, support, odds), z) - slope).norm() / slope.norm()).item()


@pytest.mark.parametrize("signal", ["learner", "rollout"])
def test_stale_draws_without_a_ratio_are_biased(signal):
    z, p_old, q = distributions(0, 7)
    drawn, odds = all_draws(p_old, 2)
    stabiliser = Unclipped(ratio=False, signal=signal)
    loss = loss_of(ReverseKL(cache=MultiSample(n=2), stabiliser=stabiliser))
    assert bias(loss, z, counted(drawn, p_old, q), odds, exact_reverse(z, q)) > 0.1


@pytest.mark.parametrize(
    "stabiliser", [Unclipped(signal="rollout"), Clipped(), M2PO(budget=0.01), Decoupled(cap=1.5)]
)
def test_stale_draws_under_a_frozen_signal_or_a_clip_are_biased(stabiliser):
    z, p_old, q = distributions(0, 7)
    drawn, odds = all_draws(p_old, 2)
    loss = loss_of(ReverseKL(cache=MultiSample(n=2), stabiliser=stabiliser), bound=0.1)
    assert bias(loss, z, counted(drawn, p_old, q), odds, exact_reverse(z, q)) > 0.1


@pytest.mark.parametrize("rest", ["bucket", "renormalise"])
def test_the_students_top_k_is_biased(rest):
    z, p_old, q = distributions(0, 40)
    kept = of_chosen(choose(StudentTopK(k=4), p_old), p_old, q)
    loss = loss_of(ReverseKL(cache=StudentTopK(k=4, rest=rest)))
    assert bias(loss, z, kept, torch.ones(1), exact_reverse(z, q)) > 0.1


def test_differentiating_the_signal_of_the_top_k_is_biased():
    # The issue is the first term: d(p log p - p log q) holds dp, whose sum over a part isn't 0.
    z, p_old, q = distributions(0, 40)
    support, odds = tops_and_tails(4, p_old, q)

    def wrong(learner_logprobs, support):
        log_p = support.gather(learner_logprobs)
        ranked = support.draws == 0
        exact_part = torch.where(ranked, log_p.exp() * (log_p - support.teacher_logprobs), 0.0)
        rho = (log_p - support.sampler_logprobs).exp()
        signal = (support.teacher_logprobs - log_p).detach()
        return support.sum(exact_part - torch.where(ranked, 0.0, rho * signal)), {}

    assert bias(wrong, z, support, odds, exact_reverse(z, q)) > 0.1


# Why the signal A is a constant


def signal_differentiated(log_p: Tensor, support: Support, n: int, alpha: float, cap=math.inf):
    """The wrong form: reverse_kl without the detach of A, so that w(a) dlog p(a) is added."""
    log_p, pi = support.gather(log_p), inclusion(support.sampler_logprobs, n, alpha)
    w = (log_p.exp() / pi).detach().clamp(max=cap)
    return support.sum(w * (log_p - support.teacher_logprobs) * (log_p - log_p.detach()).exp())


@pytest.mark.parametrize("n, alpha", POISSONS)
@pytest.mark.parametrize("seed", range(3))
def test_differentiating_the_signal_under_a_cap_is_biased(seed, n, alpha):
    # At p = q the right gradient is 0 for every cache, capped or not. The wrong form adds
    # sum_a pi(a) min(p(a)/pi(a), cap) dlog p(a), and only an uncapped sum is 0.
    z, p_old, _ = distributions(seed, 7)
    q = z.detach().log_softmax(-1)
    cap = (q.exp() / inclusion(p_old, n, alpha)).median().item()

    def wrong(log_p, support):
        return signal_differentiated(log_p, support, n, alpha, cap)

    right = expected_poisson(loss_of(poisson(n, alpha, cap)), z, p_old, q, n, alpha)
    biased = expected_poisson(wrong, z, p_old, q, n, alpha)
    assert gradient(right, z).norm() < 1e-9
    assert gradient(biased, z).norm() > 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_differentiating_the_signal_over_a_truncated_support_is_biased(seed):
    # Ids that are always kept (pi = 1), the rest never seen: the gradients of the two forms
    # differ by sum_S dp, whose other half is missing.
    z, p_old, q = distributions(seed, 40)
    top = p_old.topk(4).indices.squeeze(0).tolist()
    support = ragged([top], p_old, q)
    everywhere = 10**9
    right, _ = loss_of(poisson(everywhere, 1.0))(z.log_softmax(-1), support)
    wrong = signal_differentiated(z.log_softmax(-1), support, everywhere, 1.0)
    p = z.log_softmax(-1).exp()
    bias = gradient(wrong.sum(), z) - gradient(right.sum(), z)
    torch.testing.assert_close(bias, gradient(p[0, top].sum(), z), atol=1e-9, rtol=0)
    assert bias.norm() > 1e-3


@pytest.mark.parametrize("n, alpha", POISSONS)
def test_differentiating_the_signal_adds_noise_even_at_the_optimum(n, alpha):
    # Uncapped, the added term is 0 on average over all caches, and no single cache knows it.
    z, p_old, _ = distributions(0, 7)
    q = z.detach().log_softmax(-1)
    sets, odds = all_supports(p_old, n, alpha)
    support = ragged(sets, repeat(p_old, len(sets)), repeat(q, len(sets)))
    every_z = repeat(z, len(sets)).detach().requires_grad_()
    right, _ = loss_of(poisson(n, alpha))(every_z.log_softmax(-1), support)
    wrong = signal_differentiated(every_z.log_softmax(-1), support, n, alpha)
    assert gradient(right.sum(), every_z).abs().max() == 0
    noise = gradient(wrong.sum(), every_z)
    assert (odds @ noise).norm() < 1e-9
    assert (odds @ noise.square()).sum() > 1e-3


# Limits, caps, exact values


def test_poisson_that_keeps_everything_is_dense():
    z, p_old, q = distributions(1, 30, rows=4)
    everything = ragged([list(range(30))] * 4, p_old, q)
    kept, _ = loss_of(poisson(10**9, 1.0))(z.log_softmax(-1), everything)
    exact, _ = loss_of(DENSE)(z.log_softmax(-1), dense(p_old, q))
    torch.testing.assert_close(kept, exact, atol=1e-12, rtol=0)
    torch.testing.assert_close(gradient(kept.sum(), z), gradient(exact.sum(), z))
    torch.testing.assert_close(exact.sum(), exact_reverse(z, q))
    torch.testing.assert_close(gradient(exact.sum(), z), gradient(exact_reverse(z, q), z))


def test_a_cap_limits_the_weight_in_value_and_gradient_and_keeps_the_gradient():
    z, p_old, q = distributions(2, 6)
    n, alpha, cap = 3, 1.0, 0.9
    support = ragged([list(range(6))], p_old, q)
    p, pi = z.detach().log_softmax(-1).exp(), inclusion(p_old, n, alpha)
    weight = torch.minimum(p / pi, torch.tensor(cap))
    assert 0 < (p / pi > cap).sum() < 6, "the example has capped ids and others"
    signal = q - z.detach().log_softmax(-1)
    loss, _ = loss_of(poisson(n, alpha, cap))(z.log_softmax(-1), support)
    torch.testing.assert_close(loss, -(weight * signal).sum(1))
    log_p = z.log_softmax(-1)
    (by_id,) = torch.autograd.grad(-(weight * signal * log_p).sum(), z, retain_graph=True)
    torch.testing.assert_close(gradient(loss.sum(), z), by_id)


def test_a_cap_out_of_reach_changes_nothing():
    z, p_old, q = distributions(2, 6, rows=5)
    support = cache_for(poisson(3, 1.0), p_old, q)
    free, _ = loss_of(poisson(3, 1.0))(z.log_softmax(-1), support)
    capped, _ = loss_of(poisson(3, 1.0, 1e6))(z.log_softmax(-1), support)
    torch.testing.assert_close(free, capped, rtol=0, atol=0)


def assert_same_loss(one, other, z: Tensor):
    """Values and gradients of two (estimator, support) pairs."""
    losses = [
        loss_of(estimator)(z.log_softmax(-1), support)[0] for estimator, support in (one, other)
    ]
    torch.testing.assert_close(*losses, atol=1e-12, rtol=0)
    torch.testing.assert_close(*(gradient(x.sum(), z) for x in losses), atol=1e-12, rtol=0)


@pytest.mark.parametrize("distinct", [False, True])
def test_one_draw_is_sampled(distinct):
    z, p_old, q = distributions(1, 9, rows=5)
    tokens = [0, 3, 8, 2, 2]
    drawn = ragged([[y] for y in tokens], p_old, q, tokens, [[1]] * 5)
    once = ragged([[y] for y in tokens], p_old, q, tokens)
    estimator = ReverseKL(cache=MultiSample(n=1, distinct=distinct))
    assert_same_loss((estimator, drawn), (SAMPLED, once), z)


def test_a_count_is_as_many_repeats():
    z, p_old, q = distributions(1, 9)
    count = ragged([[4, 7]], p_old, q, [4], [[3, 1]])
    repeats = ragged([[4, 4, 4, 7]], p_old, q, [4], [[1, 1, 1, 1]])
    estimator = ReverseKL(cache=MultiSample(n=4))
    assert_same_loss((estimator, count), (estimator, repeats), z)


@pytest.mark.parametrize("k", [9, 100])
def test_top_k_tail_of_the_whole_vocabulary_is_dense(k):
    z, p_old, q = distributions(1, 9, rows=5)
    emitted = torch.tensor([0, 3, 8, 2, 2])
    kept = of_chosen(choose(TopKTail(k=k), p_old, emitted), p_old, q, emitted.tolist())
    assert_same_loss((ReverseKL(cache=TopKTail(k=k)), kept), (DENSE, dense(p_old, q)), z)


@pytest.mark.parametrize("rest", ["bucket", "renormalise"])
def test_the_students_top_k_of_the_whole_vocabulary_is_dense(rest):
    z, p_old, q = distributions(1, 9, rows=5)
    kept = of_chosen(choose(StudentTopK(k=9), p_old), p_old, q)
    estimator = ReverseKL(cache=StudentTopK(k=9, rest=rest))
    assert_same_loss((estimator, kept), (DENSE, dense(p_old, q)), z)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_dense_jensen_shannon_is_its_definition(beta):
    z, p_old, q = distributions(2, 9, rows=3)
    loss, _ = loss_of(JensenShannon(beta=beta, cache=Dense()))(z.log_softmax(-1), dense(p_old, q))
    exact = exact_jsd(z, q, beta)
    torch.testing.assert_close(loss.sum(), exact)
    torch.testing.assert_close(gradient(loss.sum(), z), gradient(exact, z))


@pytest.mark.parametrize("cache", ["dense", "teacher_top_k"])
def test_jensen_shannon_ends_in_the_forward_and_the_reverse_kl(cache):
    z, p_old, q = distributions(2, 9, rows=3)
    support = dense(p_old, q) if cache == "dense" else teacher_chosen(9, p_old, q)
    named = Dense() if cache == "dense" else TeacherTopK(k=9)

    def loss(beta):
        return loss_of(JensenShannon(beta=beta, cache=named))(z.log_softmax(-1), support)[0].sum()

    forward, reverse = exact_forward(z, q), exact_reverse(z, q)
    for exact, end, near, scale in [
        (forward, 0.0, 1e-6, 1e-6),
        (reverse, 1.0, 1 - 1e-6, 1e-6),
    ]:
        for value in (loss(end), loss(near) / scale):
            torch.testing.assert_close(value, exact, rtol=1e-4, atol=0)
            torch.testing.assert_close(gradient(value, z), gradient(exact, z), rtol=1e-3, atol=1e-4)


logits = st.lists(st.floats(-12, 12), min_size=8, max_size=8)


@settings(max_examples=150, deadline=None)
@given(logits, logits, st.integers(1, 8))
def test_teacher_top_k_is_a_nonnegative_lower_bound_of_forward_kl(student, teacher, k):
    z = torch.tensor([student], dtype=torch.float64)
    q = torch.tensor([teacher], dtype=torch.float64).log_softmax(-1)
    loss, _ = loss_of(ForwardKL(cache=TeacherTopK(k=k)))(
        z.log_softmax(-1), teacher_chosen(k, z.log_softmax(-1), q)
    )
    assert -1e-9 <= loss.item() <= exact_forward(z, q).item() + 1e-9


@settings(max_examples=150, deadline=None)
@given(logits, logits, st.integers(1, 8), st.sampled_from([0.1, 0.5, 0.9, 1.0]))
def test_a_coarse_divergence_is_a_nonnegative_lower_bound(student, teacher, k, beta):
    z = torch.tensor([student], dtype=torch.float64)
    q = torch.tensor([teacher], dtype=torch.float64).log_softmax(-1)
    p = z.log_softmax(-1)
    exact = exact_jsd(z, q, beta) if beta < 1 else exact_reverse(z, q)
    estimators = [
        (JensenShannon(beta=beta, cache=TeacherTopK(k=k)), teacher_chosen(k, p, q)),
        (
            JensenShannon(beta=beta, cache=StudentTopK(k=k)),
            of_chosen(choose(StudentTopK(k=k), p), p, q),
        ),
    ]
    for estimator, support in estimators:
        loss, _ = loss_of(estimator)(p, support)
        assert -1e-9 <= loss.item() <= exact.item() + 1e-9


@pytest.mark.parametrize("k", [9, 100])
def test_teacher_top_k_of_the_whole_vocabulary_is_dense(k):
    z, p_old, q = distributions(3, 9, rows=4)
    top, _ = loss_of(ForwardKL(cache=TeacherTopK(k=k)))(
        z.log_softmax(-1), teacher_chosen(k, p_old, q)
    )
    exact, _ = loss_of(FORWARD_DENSE)(z.log_softmax(-1), dense(p_old, q))
    torch.testing.assert_close(top, exact)
    torch.testing.assert_close(gradient(top.sum(), z), gradient(exact.sum(), z))
    torch.testing.assert_close(exact.sum(), exact_forward(z, q))
    torch.testing.assert_close(gradient(exact.sum(), z), gradient(exact_forward(z, q), z))


def test_k_of_one_learns_through_the_bucket_where_the_student_is_too_sure():
    # q = (.6, .4), p = (.9, .1): the bucket is the second id, so the loss is the whole KL,
    # .6 log(.6/.9) + .4 log(.4/.1) = -.2433 + .5545 = .3112. Without the bucket it is -.2433.
    z = torch.tensor([[0.9, 0.1]], dtype=torch.float64).log().requires_grad_()
    q = torch.tensor([[0.6, 0.4]], dtype=torch.float64).log()
    loss, statistics = loss_of(ForwardKL(cache=TeacherTopK(k=1)))(
        z.log_softmax(-1), teacher_chosen(1, q, q)
    )
    assert loss.item() == pytest.approx(0.3112, abs=1e-4)
    assert statistics["kl"].item() == loss.item()
    # d/dz of the forward KL is p - q.
    expected = torch.tensor([[0.3, -0.3]], dtype=torch.float64)
    torch.testing.assert_close(gradient(loss.sum(), z), expected)


def test_k_of_one_learns_where_the_student_is_too_unsure():
    z = torch.tensor([[0.1, 0.5, 0.4]], dtype=torch.float64).log().requires_grad_()
    q = torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64).log()
    loss, _ = loss_of(ForwardKL(cache=TeacherTopK(k=1)))(z.log_softmax(-1), teacher_chosen(1, q, q))
    # The bucket's mass goes from .9 to .4, and is shared as the student shares it (5 : 4).
    expected = torch.tensor([[0.1 - 0.6, 0.5 - 0.4 * 5 / 9, 0.4 - 0.4 * 4 / 9]])
    torch.testing.assert_close(gradient(loss.sum(), z), expected.double())
    assert loss.item() > 0


def test_a_student_sure_of_the_cached_ids_still_learns_of_the_others():
    # In float32 the student's probability of the cached id rounds to 1. The gradient with
    # respect to the other logits is still (their share of the rest) * -(1 - Q) = -0.2 each.
    z = torch.tensor([[60.0, 0.0, 0.0]], requires_grad=True)
    q = torch.tensor([[0.6, 0.2, 0.2]]).log()
    loss, _ = loss_of(ForwardKL(cache=TeacherTopK(k=1)))(z.log_softmax(-1), teacher_chosen(1, q, q))
    torch.testing.assert_close(gradient(loss.sum(), z), torch.tensor([[0.4, -0.2, -0.2]]))


def test_a_bucket_that_the_student_cannot_fill_is_left_out():
    # Without the third id the student's vocabulary is the cached one. The bucket's KL is infinite.
    z = torch.tensor([[0.5, -0.5, -math.inf]], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64).log()
    loss, _ = loss_of(ForwardKL(cache=TeacherTopK(k=2)))(z.log_softmax(-1), teacher_chosen(2, q, q))
    log_p = z[:, :2].detach().log_softmax(-1)
    expected = (q[:, :2].exp() * (q[:, :2] - log_p)).sum(1)
    torch.testing.assert_close(loss, expected)
    # p (Q_S) - q on the support.
    slope = torch.cat([0.9 * log_p.exp() - q[:, :2].exp(), torch.zeros(1, 1).double()], 1)
    torch.testing.assert_close(gradient(loss.sum(), z), slope)


def test_teacher_probabilities_that_round_to_more_than_one_leave_an_empty_bucket():
    z = torch.zeros(1, 3, requires_grad=True)
    q = torch.tensor([[0.6000001, 0.4000001, 1e-9]]).log()
    assert q[0, :2].exp().sum() > 1
    loss, _ = loss_of(ForwardKL(cache=TeacherTopK(k=2)))(z.log_softmax(-1), teacher_chosen(2, q, q))
    torch.testing.assert_close(loss.sum(), exact_forward(z, q))
    assert gradient(loss.sum(), z).isfinite().all()


# Same model, same position


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_zero_estimator
def test_a_student_equal_to_the_teacher_has_zero_loss_and_gradient(name, dtype):
    z, p_old, _ = distributions(4, 12, rows=40)
    z = z.detach().to(dtype).requires_grad_()
    p_old, q = p_old.float(), z.detach().float().log_softmax(-1)
    loss, statistics = loss_of(ESTIMATORS[name])(
        z.float().log_softmax(-1), cache_for(ESTIMATORS[name], p_old, q)
    )
    torch.testing.assert_close(loss, torch.zeros(40), atol=1e-6, rtol=0)
    torch.testing.assert_close(statistics["kl"], torch.zeros(40), atol=1e-6, rtol=0)
    slope = gradient(loss.sum(), z).float()
    torch.testing.assert_close(slope, torch.zeros(40, 12), atol=1e-6, rtol=0)


def hash_logprobs(n: int, vocabulary: int) -> Tensor:
    """A model whose score of id a after t tokens is a hash of (t, a)."""
    t, a = torch.arange(n)[:, None], torch.arange(vocabulary)[None]
    return (((t + 1) * (a + 1) * 40503 % 65521).double() / 16000).log_softmax(-1)


@each_estimator
def test_a_hash_student_agrees_with_a_hash_teacher_only_at_the_same_position(name):
    model = hash_logprobs(31, 12)
    p, shifted = model[:-1], model[1:]
    loss = loss_of(ESTIMATORS[name])
    aligned, _ = loss(p, cache_for(ESTIMATORS[name], p, p))
    assert aligned.abs().max() < 1e-12
    off_by_one, _ = loss(p, cache_for(ESTIMATORS[name], p, shifted))
    assert off_by_one.abs().max() > 0.1


# Ragged, empty, impossible


@each_estimator
def test_losses_of_parts_are_the_parts_of_the_loss(name):
    z, p_old, q = distributions(6, 12, rows=11)
    support, log_p = cache_for(ESTIMATORS[name], p_old, q), z.log_softmax(-1)
    whole, statistics = loss_of(ESTIMATORS[name])(log_p, support)
    lengths = [0, 1, 2, 7, 1, 0]  # responses without a token, with one, two and more
    stops = list(itertools.accumulate(lengths))
    parts = [slice(stop - n, stop) for stop, n in zip(stops, lengths, strict=True)]
    losses = [loss_of(ESTIMATORS[name])(log_p[part], support[part]) for part in parts]
    torch.testing.assert_close(torch.cat([x for x, _ in losses]), whole)
    for key, value in statistics.items():
        assert value.shape == (11,) and not value.requires_grad
        torch.testing.assert_close(torch.cat([s[key] for _, s in losses]), value)


def test_slices_of_a_support_follow_python_and_refuse_a_step():
    _, p_old, q = distributions(6, 5, rows=4)
    support = ragged([[0, 1], [], [2], [3, 4, 1]], p_old, q, tokens=[0, 1, 2, 3])
    assert support[1:3].offsets.tolist() == [0, 0, 1]
    assert support[1:3].ids.tolist() == [2]
    assert support[-1:].ids.tolist() == [3, 4, 1]
    assert len(support[3:1]) == len(support[4:]) == 0
    assert support[2:99].token_ids.tolist() == [2, 3]
    with pytest.raises(ValueError, match="contiguous"):
        support[::2]


def test_columns_of_different_lengths_are_refused():
    _, p_old, q = distributions(6, 5, rows=2)
    support = ragged([[0, 1], [2]], p_old, q)
    columns = vars(support) | {"teacher_logprobs": support.teacher_logprobs[:-1]}
    with pytest.raises(ValueError, match="lengths"):
        Support(**columns)


@each_estimator
def test_no_token_at_all_gives_no_loss_and_a_zero_gradient(name):
    z, p_old, q = distributions(6, 12, rows=3)
    support = cache_for(ESTIMATORS[name], p_old, q)[:0]
    loss, statistics = loss_of(ESTIMATORS[name])(z[:0].log_softmax(-1), support)
    assert loss.shape == (0,) and all(x.shape == (0,) for x in statistics.values())
    assert gradient(loss.sum(), z).abs().max() == 0


@pytest.mark.parametrize("name", ["sampled", "poisson", "teacher_top_k"])
def test_a_token_without_cached_ids_has_zero_loss_and_gradient(name):
    z, p_old, q = distributions(6, 8, rows=3)
    support = ragged([[1, 2], [], [3]], p_old, q)
    loss, statistics = loss_of(ESTIMATORS[name])(z.log_softmax(-1), support)
    slope = gradient(loss.sum(), z)
    assert loss[1].abs() < 1e-12 and loss[0] != 0
    assert slope[1].abs().max() < 1e-12 and slope[[0, 2]].abs().amax(1).min() > 1e-3
    assert statistics["kept"].tolist() == [2, 0, 1]


REVERSE, EVERYONE = ["sampled", "poisson", "capped poisson"], ["learner", "sampler", "teacher"]


@pytest.mark.parametrize("impossible", [-math.inf, -9999.0])
@pytest.mark.parametrize(
    "name, who",
    [*itertools.product(REVERSE, EVERYONE), *itertools.product(["teacher_top_k"], EVERYONE[::2])],
)
def test_an_impossible_id_is_as_if_it_were_not_cached(name, who, impossible):
    z, p_old, q = distributions(7, 8, rows=3)
    models = {"learner": z.detach(), "sampler": p_old, "teacher": q}
    models[who] = models[who].index_fill(1, torch.tensor([2]), impossible)
    z, p_old, q = models["learner"].requires_grad_(), models["sampler"], models["teacher"]
    loss = loss_of(ESTIMATORS[name])
    with_it, statistics = loss(z.log_softmax(-1), ragged([[1, 2], [2], [3]], p_old, q))
    without, _ = loss(z.log_softmax(-1), ragged([[1], [], [3]], p_old, q))
    torch.testing.assert_close(with_it, without)
    slope = gradient(with_it.sum(), z)
    assert slope.isfinite().all()
    torch.testing.assert_close(slope, gradient(without.sum(), z))
    assert statistics["kept"].tolist() == [1, 0, 1]
    assert statistics["impossible"].tolist() == [1, 1, 0]
    assert all(x.isfinite().all() for x in statistics.values())


@pytest.mark.parametrize("impossible", [-math.inf, -9999.0])
@pytest.mark.parametrize("name", ["dense", "forward dense"])
def test_ids_masked_in_both_models_leave_a_smaller_vocabulary(name, impossible):
    z, p_old, q = distributions(7, 8, rows=3)
    masked = torch.where(torch.arange(8) < 6, z, impossible)
    q6, p6 = q[:, :6].log_softmax(-1), p_old[:, :6].log_softmax(-1)
    q8 = torch.cat([q6, torch.full((3, 2), impossible, dtype=q.dtype)], 1)
    loss = loss_of(ESTIMATORS[name])
    large, _ = loss(masked.log_softmax(-1), dense(p_old, q8))
    small, _ = loss(z[:, :6].log_softmax(-1), dense(p6, q6))
    torch.testing.assert_close(large, small)
    torch.testing.assert_close(gradient(large.sum(), z), gradient(small.sum(), z))


@each_estimator
def test_a_nan_reaches_the_loss(name):
    z, p_old, q = distributions(7, 12, rows=2)
    support = cache_for(ESTIMATORS[name], p_old, q)
    columns = vars(support) | {"teacher_logprobs": support.teacher_logprobs * math.nan}
    columns.pop("rows", None)
    loss, _ = loss_of(ESTIMATORS[name])(z.log_softmax(-1), Support(**columns))
    assert loss.isnan().all()


@each_estimator
def test_tokens_do_not_see_each_other(name):
    z, p_old, q = distributions(8, 12, rows=6)
    support, log_p = cache_for(ESTIMATORS[name], p_old, q), z.log_softmax(-1)
    slope = gradient(loss_of(ESTIMATORS[name])(log_p, support)[0][2], z)
    assert slope[2].abs().max() > 1e-3
    assert slope[[0, 1, 3, 4, 5]].abs().max() == 0


# Statistics, misuse


def test_statistics_are_what_their_names_say():
    p = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.5, 0.0]], dtype=torch.float64)
    p_old = torch.tensor([[0.4, 0.4, 0.2], [0.2, 0.4, 0.4]], dtype=torch.float64).log()
    q = torch.tensor([[0.5, 0.4, 0.1], [0.2, 0.4, 0.4]], dtype=torch.float64).log()
    support = ragged([[0, 2], [1, 2]], p_old, q, tokens=[2, 0])
    loss, statistics = loss_of(poisson(10**6, 1.0))(p.log(), support)
    expected = {
        # .5 log(.5/.5) + .25 log(.25/.1); .5 log(.5/.4)
        "kl": [0.25 * math.log(2.5), 0.5 * math.log(1.25)],
        # .5 log 2 + 2 * .25 log 4; log 2
        "entropy": [1.5 * math.log(2), math.log(2)],
        "ratio": [0.25 / 0.2, 0.5 / 0.2],
        "kept": [2, 1],
        "impossible": [0, 1],
        "covered": [0.75, 0.5],
        "clipped": [0, 0],
    }
    assert statistics.keys() == expected.keys()
    for name, values in expected.items():
        assert statistics[name].tolist() == pytest.approx(values), name
    assert loss.tolist() == pytest.approx(expected["kl"])


def test_the_dense_loss_refuses_a_part_of_the_vocabulary():
    z, p_old, q = distributions(9, 6, rows=2)
    with pytest.raises(ValueError, match=r"estimator\.cache"):
        loss_of(DENSE)(z.log_softmax(-1), ragged([[1], [2, 3]], p_old, q))


@pytest.mark.parametrize("name", ["sampled", "poisson"])
def test_a_cache_of_the_teachers_choice_is_refused_by_reverse_kl(name):
    z, p_old, q = distributions(9, 6, rows=2)
    with pytest.raises(ValueError, match="forward_kl"):
        loss_of(ESTIMATORS[name])(z.log_softmax(-1), teacher_chosen(3, p_old, q))


@pytest.mark.parametrize("cache", [MultiSample(n=3), TopKTail(k=2)])
def test_a_cache_without_counts_is_refused_where_counts_are_needed(cache):
    z, p_old, q = distributions(9, 6, rows=2)
    with pytest.raises(ValueError, match=r"how often.*estimator\.cache"):
        loss_of(ReverseKL(cache=cache))(z.log_softmax(-1), ragged([[1], [2, 3]], p_old, q))


# Stabilisers


def one_id_each(z, p_old, q):
    """One token for each id of a vocabulary, which emitted it."""
    v = p_old.shape[1]
    return repeat(z, v).detach().requires_grad_(), ragged(
        [[a] for a in range(v)], repeat(p_old, v), repeat(q, v), list(range(v))
    )


def slope_by_id(stabiliser, z, p_old, q, bound=math.inf):
    """d loss / d log p(y) and the loss of each emitted token y, of a `sampled` cache."""
    every_z, support = one_id_each(z, p_old, q)
    log_p = every_z.log_softmax(-1).detach().requires_grad_()
    loss, statistics = loss_of(ReverseKL(cache=Sampled(), stabiliser=stabiliser), bound)(
        log_p, support
    )
    return gradient(loss.sum(), log_p).diagonal(), loss.detach(), statistics


@pytest.mark.parametrize("signal", ["learner", "rollout"])
def test_a_clip_is_ppos(signal):
    z, p_old, q = distributions(11, 60, scale=0.3)
    slope, loss, statistics = slope_by_id(Clipped(signal=signal, eps=0.2), z, p_old, q)
    log_p = z.detach().log_softmax(-1).squeeze(0).requires_grad_()
    rho = (log_p - p_old.squeeze(0)).exp()
    behind = log_p.detach() if signal == "learner" else p_old.squeeze(0)
    a = q.squeeze(0) - behind
    objective = -torch.minimum(rho * a, rho.clamp(0.8, 1.2) * a)
    torch.testing.assert_close(loss, objective.detach())
    torch.testing.assert_close(slope, torch.autograd.grad(objective.sum(), log_p)[0])
    assert 0 < statistics["clipped"].sum() < 60
    assert torch.equal(statistics["clipped"] == 1, slope == 0)


def test_the_kl_that_is_reported_is_the_divergence_under_any_stabiliser():
    z, p_old, q = distributions(11, 12)
    _, _, plain = slope_by_id(Unclipped(), z, p_old, q)
    for stabiliser in (Unclipped(signal="rollout", ratio=False), Clipped(), M2PO(), Decoupled()):
        _, loss, statistics = slope_by_id(stabiliser, z, p_old, q, bound=0.1)
        torch.testing.assert_close(statistics["kl"], plain["kl"])
        assert (loss - plain["kl"]).abs().max() > 1e-2


def test_without_ratio_the_gradient_is_the_signals():
    z, p_old, q = distributions(11, 12)
    slope, _, _ = slope_by_id(Unclipped(ratio=False), z, p_old, q)
    torch.testing.assert_close(slope, -(q - z.detach().log_softmax(-1)).squeeze(0))


def test_a_decoupled_clip_holds_the_ratio_to_the_proximal_policy_and_leaves_far_ids_out():
    z, p_old, q = distributions(12, 60, scale=0.6)
    every_z, support = one_id_each(z, p_old, q)
    proximal = (0.6 * z.detach() + 0.4 * p_old).log_softmax(-1).squeeze(0)
    support = Support(**vars(support) | {"proximal_logprobs": proximal})
    log_p = every_z.log_softmax(-1).detach().requires_grad_()
    stabiliser = Decoupled(eps=0.1, cap=1.3)
    loss, statistics = loss_of(ReverseKL(cache=Sampled(), stabiliser=stabiliser))(log_p, support)
    own = z.detach().log_softmax(-1).squeeze(0).requires_grad_()
    weight, ratio = (proximal - p_old.squeeze(0)).exp(), (own - proximal).exp()
    a = (q.squeeze(0) - own).detach()
    objective = -weight * torch.minimum(ratio * a, ratio.clamp(0.9, 1.1) * a)
    objective = torch.where(weight > 1.3, 0.0, objective)
    torch.testing.assert_close(loss.detach(), objective.detach())
    (expected,) = torch.autograd.grad(objective.sum(), own)
    torch.testing.assert_close(gradient(loss.sum(), log_p).diagonal(), expected)
    assert (weight > 1.3).any() and statistics["clipped"][weight > 1.3].all()


def test_m2po_clips_at_its_bound_in_the_harmful_direction_only():
    z, p_old, q = distributions(12, 60, scale=0.6)
    slope, _, _ = slope_by_id(M2PO(), z, p_old, q, bound=0.5)
    log_ratio = (z.detach().log_softmax(-1) - p_old).squeeze(0)
    a = (q - z.detach().log_softmax(-1)).squeeze(0)
    clipped = (log_ratio * a > 0) & (log_ratio.abs() > 0.5)
    assert 0 < clipped.sum() < 60
    assert torch.equal(slope == 0, clipped)


def test_m2pos_bound_is_the_widest_within_the_budget():
    ratios = torch.tensor([0.1, -0.2, 0.3, -5.0, 0.05])
    signals = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])  # the last two move the other way
    # Squares .01, .04, .09: means .01, .025, .0467.
    for budget, bound in [(0.05, math.inf), (0.04, 0.2), (0.02, 0.1), (0.001, 0.0)]:
        assert m2po_bound(ratios, signals, budget) == pytest.approx(bound)
    assert m2po_bound(ratios[:0], signals[:0], 0.01) == math.inf


def optimised(stabiliser, steps=3000):
    """Entropy of a categorical after gradient descent on an exact expectation over old draws."""
    z, p_old, q = distributions(13, 6, scale=0.5)
    drawn, odds = all_draws(p_old, 1)
    support = counted(drawn, p_old, q)
    loss = loss_of(ReverseKL(cache=Sampled(), stabiliser=stabiliser))
    z = p_old.clone().requires_grad_()
    for _ in range(steps):
        slope = gradient(expectation(loss, z, support, odds), z)
        z = (z - 0.5 * slope).detach().requires_grad_()
    p = z.softmax(-1)
    return torch.special.entr(p).sum().item(), exact_reverse(z, q).item(), (q - p_old).argmax(), p


def test_a_frozen_unclipped_signal_collapses_to_one_id_and_a_learner_signal_finds_the_teacher():
    # The frozen objective is linear in p: its optimum is a point mass on argmax q / p_old.
    entropy, _, winner, p = optimised(Unclipped(signal="rollout"))
    assert entropy < 0.05 and p.argmax() == winner
    entropy, kl, _, _ = optimised(Unclipped())
    assert entropy > 0.5 and kl < 1e-6


def test_proximal_logprobs_are_the_learners_at_the_cached_ids():
    z, p_old, q = distributions(9, 6, rows=2)
    support = ragged([[1], [2, 3]], p_old, q)
    zero, statistics = proximal_logprobs(z.log_softmax(-1), support)
    log_p = z.log_softmax(-1)
    assert statistics["log_p"].tolist() == [log_p[0, 1], log_p[1, 2], log_p[1, 3]]
    assert zero.tolist() == [0, 0]
