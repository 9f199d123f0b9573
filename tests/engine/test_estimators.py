"""The losses against their definitions.

Expectations are enumerated, never sampled: each possible cache is one token of a batch, and its
probability weighs that token's loss. Only draw_poisson is tested by frequencies.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.config import Dense, ForwardKL, Poisson, ReverseKL, Sampled, TeacherTopK
from engine.estimators import (
    Support,
    _thin,
    draw_poisson,
    inclusion_log_probability,
    loss_of,
    reverse_kl,
    top_k_support,
)

POISSONS = [(1, 1.0), (3, 1.0), (8, 0.75), (40, 0.5)]  # none to several ids kept for certain
SAMPLED, DENSE = ReverseKL(cache=Sampled()), ReverseKL(cache=Dense())
FORWARD_DENSE = ForwardKL(cache=Dense())
ESTIMATORS = {
    "sampled": SAMPLED,
    "poisson": ReverseKL(cache=Poisson(n=8, alpha=0.75)),
    "capped poisson": ReverseKL(cache=Poisson(n=8, alpha=0.75, max_ratio=1.5)),
    "dense": DENSE,
    "teacher_top_k": ForwardKL(cache=TeacherTopK(k=3)),
    "forward dense": FORWARD_DENSE,
}
each_estimator = pytest.mark.parametrize("name", ESTIMATORS)


def poisson(n, alpha, max_ratio=None):
    return ReverseKL(cache=Poisson(n=n, alpha=alpha, max_ratio=max_ratio))


def distributions(seed: int, vocabulary: int, rows: int = 1, scale: float = 1.5):
    """Logits of the learner, log-probabilities of a stale sampler and of a teacher."""
    generator = torch.Generator().manual_seed(seed)
    z, drift, teacher = scale * torch.randn(
        3, rows, vocabulary, generator=generator, dtype=torch.float64
    )
    return z.requires_grad_(), (z.detach() + drift).log_softmax(-1), teacher.log_softmax(-1)


def ragged(kept: list[list[int]], p_old: Tensor, q: Tensor, tokens: list[int] | None = None):
    """The cache in which token i owns the ids kept[i]."""
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


def teacher_chosen(k: int, p_old: Tensor, q: Tensor):
    counts, ids, logprobs = top_k_support(q, k)
    empty = ragged([[] for _ in range(len(q))], p_old, q)
    return Support(
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
        ids=ids,
        sampler_logprobs=empty.sampler_logprobs,
        teacher_logprobs=logprobs,
        token_ids=empty.token_ids,
        token_sampler_logprobs=empty.token_sampler_logprobs,
    )


def cache_for(estimator, p_old: Tensor, q: Tensor, seed: int = 0):
    """A random cache, as sampler and teacher would fill it."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.multinomial(p_old.exp(), 1, generator=generator).squeeze(1).tolist()
    match estimator.cache:
        case Sampled():
            return ragged([[y] for y in tokens], p_old, q, tokens)
        case Poisson(n=n, alpha=alpha):
            counts, ids, _ = draw_poisson(p_old, n, alpha, generator)
            kept = [part.tolist() for part in ids.split(counts.tolist())]
            return ragged(kept, p_old, q, tokens)
        case TeacherTopK(k=k):
            return teacher_chosen(k, p_old, q)
        case Dense():
            return dense(p_old, q, tokens)


def repeat(logprobs: Tensor, times: int):
    return logprobs.expand(times, -1)


def gradient(value: Tensor, z: Tensor):
    return torch.autograd.grad(value, z, retain_graph=True)[0]


def exact_reverse(z: Tensor, q: Tensor):
    log_p = z.log_softmax(-1)
    return (log_p.exp() * (log_p - q)).sum()


def exact_forward(z: Tensor, q: Tensor):
    return (q.exp() * (q - z.log_softmax(-1))).sum()


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
@each_estimator
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
    return (((t * 2654435761 + a * 40503) % 65521).double() / 16000).log_softmax(-1)


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
    assert loss[1] == 0 and loss[0] != 0
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


def test_an_inclusion_probability_unknown_to_the_configuration_can_be_used_directly():
    # Distinct ids among N draws with replacement are included with 1 - (1 - p_old)^N.
    z, p_old, q = distributions(9, 6)

    def among_four_draws(log_p_old):
        return torch.log1p(-((1 - log_p_old.exp()) ** 4))

    support = ragged([[a] for a in range(6)], repeat(p_old, 6), repeat(q, 6))
    losses, _ = reverse_kl(repeat(z.log_softmax(-1), 6), support, among_four_draws)
    expected = (among_four_draws(p_old).exp().squeeze(0) * losses).sum()
    torch.testing.assert_close(
        gradient(expected, z), gradient(exact_reverse(z, q), z), atol=1e-9, rtol=0
    )


# Which ids are cached


def deviation_allowed(pi: Tensor, trials: int) -> Tensor:
    """Six standard deviations of a frequency: once in 5e8 for each id."""
    return 6 * (pi * (1 - pi) / trials).sqrt() + 1e-12


TRIALS = 40_000


@pytest.fixture(scope="module", params=[(1, 1.0), (2, 1.0), (6, 0.5)], ids=str)
def draws(request):
    """Many draws from one row that has certain, likely, rare and impossible ids.

    The emitted token comes from the same generator, right before, as in a sampler.
    """
    n, alpha = request.param
    p_old = torch.tensor([0.6, 0.2, 0.1, 0.05, 0.03, 0.012, 0.006, 0.002, 0.0]).log()
    rows, generator = p_old.expand(TRIALS, -1), torch.Generator().manual_seed(0)
    emitted = torch.multinomial(rows.exp(), 1, generator=generator).squeeze(1)
    counts, ids, logprobs = draw_poisson(rows, n, alpha, generator)
    kept = torch.zeros(TRIALS, 9)
    kept[torch.repeat_interleave(counts), ids] = 1
    assert kept.sum() == len(ids) == counts.sum(), "no id is kept twice"
    assert torch.equal(logprobs, p_old[ids])
    return kept, emitted, inclusion(p_old, n, alpha)


def test_poisson_keeps_each_id_with_its_inclusion_probability(draws):
    kept, _, pi = draws
    assert ((kept.mean(0) - pi).abs() <= deviation_allowed(pi, TRIALS)).all()
    assert kept[:, 8].sum() == 0


def test_poisson_keeps_ids_independently_of_each_other(draws):
    kept, _, pi = draws
    together, expected = kept.T @ kept / TRIALS, pi[:, None] * pi
    off = ~torch.eye(9, dtype=torch.bool)
    allowed = deviation_allowed(expected, TRIALS)
    assert ((together - expected).abs() <= allowed)[off].all()


def test_poisson_keeps_ids_independently_of_neighbouring_rows(draws):
    kept, _, pi = draws
    together, expected = kept[1:].T @ kept[:-1] / (TRIALS - 1), pi[:, None] * pi
    # Neighbouring pairs overlap, which at most doubles the variance.
    assert ((together - expected).abs() <= 1.5 * deviation_allowed(expected, TRIALS)).all()


def test_poisson_keeps_ids_independently_of_the_emitted_token(draws):
    kept, emitted, pi = draws
    for token in range(5):
        given_token = kept[emitted == token]
        assert ((given_token.mean(0) - pi).abs() <= deviation_allowed(pi, len(given_token))).all()


def test_thinning_lets_each_survive_independently():
    generator, trials = torch.Generator().manual_seed(0), 20_000
    survived = torch.zeros(trials, 20)
    for row in survived:
        row[_thin(20, 0.3, torch.device("cpu"), generator)] = 1
    together, expected = survived.T @ survived / trials, torch.full((20, 20), 0.09)
    expected.fill_diagonal_(0.3)
    assert ((together - expected).abs() <= deviation_allowed(expected, trials)).all()


def test_ids_likelier_than_one_nth_are_always_kept():
    p_old = torch.tensor([[0.7, 0.2, 0.1]]).log().expand(500, -1)
    counts, ids, _ = draw_poisson(p_old, n=5, alpha=0.75)
    assert (ids == 0).sum() == (ids == 1).sum() == 500
    assert 500 < (ids == 2).sum() + 500 < 1000 and counts.sum() == len(ids)


def test_a_large_vocabulary_is_drawn_as_often_as_expected_row_by_row():
    generator = torch.Generator().manual_seed(1)
    p_old = (2 * torch.randn(16, 30_000, generator=generator)).log_softmax(-1)
    counts, ids, logprobs = draw_poisson(p_old, 256, 0.75, generator)
    pi = inclusion(p_old, 256, 0.75)
    spread = (pi * (1 - pi)).sum(1).sqrt()
    assert ((counts - pi.sum(1)).abs() <= 6 * spread).all()
    assert torch.equal(logprobs, p_old[torch.repeat_interleave(counts), ids])
    # Also along the vocabulary: its halves get their shares.
    low = torch.bincount(torch.repeat_interleave(counts)[ids < 15_000], minlength=16)
    assert ((low - pi[:, :15_000].sum(1)).abs() <= 6 * spread).all()


def test_a_seed_repeats_a_draw():
    p_old = torch.randn(4, 100).log_softmax(-1)
    first, again, other = (
        draw_poisson(p_old, 16, 1.0, torch.Generator().manual_seed(seed))[1] for seed in (7, 7, 8)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_no_rows_draw_no_ids():
    counts, ids, logprobs = draw_poisson(torch.zeros(0, 10), 16, 1.0)
    assert len(counts) == len(ids) == len(logprobs) == 0


def test_inclusion_probability_is_capped_at_one_and_zero_for_the_impossible():
    p_old = torch.tensor([0.5, 0.25, 0.01, 0.0]).log()
    pi = inclusion_log_probability(p_old, 4, 0.5).exp()
    torch.testing.assert_close(pi, torch.tensor([1.0, 1.0, 0.2, 0.0]))


def test_top_k_keeps_the_teachers_likeliest_ids():
    q = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3]]).log()
    counts, ids, logprobs = top_k_support(q, 2)
    assert counts.tolist() == [2, 2]
    assert ids.tolist() == [1, 2, 0, 2]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.6, 0.3, 0.5, 0.3]))
