"""Which ids are cached, by exact counts and by frequencies."""

import pytest
import torch
from torch import Tensor

from engine.config import (
    Dense,
    MultiSample,
    Poisson,
    Sampled,
    StudentTopK,
    TeacherMultiSample,
    TeacherTopK,
    TopKTail,
)
from engine.support import _thin, choose, inclusion_log_probability


def inclusion(p_old: Tensor, n: int, alpha: float):
    """min(1, (n p_old)^alpha), written down a second time."""
    return torch.minimum(torch.ones_like(p_old), (n * p_old.exp()) ** alpha)


def draw_poisson(logprobs, n, alpha, generator=None):
    kept = choose(Poisson(n=n, alpha=alpha), logprobs, None, generator)
    return kept.counts, kept.ids, kept.logprobs


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


@pytest.mark.parametrize("kind", [TeacherTopK, StudentTopK])
def test_top_k_keeps_the_likeliest_ids(kind):
    q = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3]]).log()
    kept = choose(kind(k=2), q)
    assert kept.counts.tolist() == [2, 2]
    assert kept.ids.tolist() == [1, 2, 0, 2]
    torch.testing.assert_close(kept.logprobs.exp(), torch.tensor([0.6, 0.3, 0.5, 0.3]))
    assert choose(kind(k=9), q).counts.tolist() == [3, 3]


def test_the_emitted_token_is_what_sampled_keeps():
    p_old = torch.randn(3, 5).log_softmax(-1)
    kept = choose(Sampled(), p_old, torch.tensor([4, 0, 2]))
    assert kept.counts.tolist() == [1, 1, 1] and kept.ids.tolist() == [4, 0, 2]
    assert torch.equal(kept.logprobs, p_old[range(3), [4, 0, 2]])


def test_dense_lists_nothing():
    kept = choose(Dense(), torch.randn(3, 5).log_softmax(-1))
    assert kept.counts.tolist() == [0, 0, 0] and len(kept.ids) == 0


@pytest.mark.parametrize("n", [1, 2, 40])
def test_draws_count_the_emitted_token_and_n_minus_one_others(n):
    generator = torch.Generator().manual_seed(0)
    p_old = torch.randn(50, 7, generator=generator).log_softmax(-1)
    emitted = torch.multinomial(p_old.exp(), 1, generator=generator).squeeze(1)
    kept = choose(MultiSample(n=n), p_old, emitted, generator)
    rows = torch.repeat_interleave(kept.counts)
    totals = torch.zeros(50, dtype=torch.int64).index_add(0, rows, kept.draws)
    assert totals.tolist() == [n] * 50
    assert all(emitted[row] in kept.ids[rows == row] for row in range(50))
    assert torch.equal(kept.logprobs, p_old[rows, kept.ids])
    assert len(set(zip(rows.tolist(), kept.ids.tolist(), strict=True))) == len(rows)


def test_draws_come_as_often_as_their_probability_says():
    p = torch.tensor([0.6, 0.2, 0.1, 0.05, 0.03, 0.02, 0.0])
    generator = torch.Generator().manual_seed(0)
    kept = choose(TeacherMultiSample(n=50_000), p.log().expand(4, -1), None, generator)
    rows = torch.repeat_interleave(kept.counts)
    for row in range(4):
        frequencies = torch.zeros(7)
        frequencies[kept.ids[rows == row]] = kept.draws[rows == row] / 50_000
        assert ((frequencies - p).abs() <= deviation_allowed(p, 50_000)).all()
        assert frequencies[6] == 0


def test_forced_ids_come_first_and_are_not_kept_twice():
    generator = torch.Generator().manual_seed(0)
    p_old = torch.randn(200, 30, generator=generator).log_softmax(-1)
    kept = choose(Poisson(n=20, alpha=1.0, top_k=3), p_old, None, generator)
    for row, ids in enumerate(kept.ids.split(kept.counts.tolist())):
        assert ids[:3].tolist() == p_old[row].topk(3).indices.tolist()
        assert len(set(ids.tolist())) == len(ids)
    free = choose(Poisson(n=20, alpha=1.0), p_old, None, generator)
    assert len(kept.ids) > len(free.ids) > 3 * 200


def test_the_tail_is_the_emitted_token_where_it_is_not_among_the_top():
    p_old = torch.tensor([[0.5, 0.3, 0.15, 0.05]] * 3).log()
    kept = choose(TopKTail(k=2), p_old, torch.tensor([0, 3, 2]))
    assert kept.counts.tolist() == [2, 3, 3]
    assert kept.ids.tolist() == [0, 1, 0, 1, 3, 0, 1, 2]
    assert kept.draws.tolist() == [0, 0, 0, 0, 1, 0, 0, 1]
    torch.testing.assert_close(kept.logprobs, p_old[0, kept.ids])


def test_a_thinned_top_keeps_its_ids_with_their_inclusion_probability():
    p_old = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(20_000, -1)
    generator = torch.Generator().manual_seed(0)
    emitted = torch.zeros(20_000, dtype=torch.int64)
    kept = choose(TopKTail(k=3, n=3, alpha=0.5), p_old, emitted, generator)
    frequencies = torch.bincount(kept.ids, minlength=4) / 20_000
    pi = inclusion(p_old[0], 3, 0.5)
    pi[3] = 0  # outside the top, and never emitted here
    assert ((frequencies - pi).abs() <= deviation_allowed(pi, 20_000)).all()
