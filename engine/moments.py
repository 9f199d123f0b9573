"""How often a cache keeps each id: mean and covariance over its draws, in closed form.

    coins      each id by its own, pi          Cov = diag(pi (1 - pi))
    draws      n of them, with replacement     Cov = n (diag(p) - p p^T)
    distinct   the same, each id once          Cov_ab = (1 - p_a - p_b)^n - (1 - p_a)^n (1 - p_b)^n

A gradient that is a sum over the kept ids, sum_a c_a s_a (e_a - p) with respect to the logits of
learner p, has the mean of its counts c in place of them, and the variance that `variance` sums in
O(V) though Cov has V^2 entries. `probe` makes random counts with this very covariance and without
the long tails of the true ones: an id that is kept once in a million draws, and then drowns a
batch, is in every probe with the root of its variance, so that few probes measure what millions of
draws would.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from engine.config import Cache, MultiSample, Poisson, Sampled, TeacherMultiSample, TopKTail
from engine.support import inclusion_log_probability

# Terms of a sum that are smaller than this share of it are lost in float64 anyway.
ROUNDING = 1e-16
# Of the orders that the presence of an id among n draws is made of: order j has at most 2^-j of its
# variance, whatever n and the id's probability are.
ORDERS = 16


@dataclass(frozen=True)
class Moments:
    """Of how often each id of n rows is kept: by a coin, or by draws; an id by one of the two."""

    coins: Float[Tensor, "n V"]
    """Probability of the id's coin; 0 where it has none. All here is float64."""
    drawn: Float[Tensor, "n V"]
    """Probability of the id in one draw; 0 where draws don't count. A row sums to 1 or less."""
    draws: int = 0
    distinct: bool = False
    """An id counts once, however often it is drawn."""

    @property
    def kept(self) -> Float[Tensor, "n V"]:
        """Probability that the id is kept at all."""
        return self.coins - torch.expm1(self.draws * torch.log1p(-self.drawn))

    @property
    def mean(self) -> Float[Tensor, "n V"]:
        return self.kept if self.distinct else self.coins + self.draws * self.drawn

    def variance(
        self, slopes: Float[Tensor, "n V"], learner: Float[Tensor, "n V"]
    ) -> Float[Tensor, " n"]:
        """Trace of the covariance of sum_a c_a slope_a (e_a - learner), at each row."""
        squares = slopes.square() * _squared_norms(learner)
        total = (squares * self.coins * (1 - self.coins)).sum(1)
        if self.distinct:
            return total + self._distinct_variance(squares, slopes, learner)
        together = gradient(slopes * self.drawn, learner).square().sum(1)
        return total + self.draws * ((squares * self.drawn).sum(1) - together)

    def _distinct_variance(self, squares: Tensor, slopes: Tensor, learner: Tensor) -> Tensor:
        """With r = p / (1 - p), Cov_ab = (1 - p_a)^n (1 - p_b)^n ((1 - r_a r_b)^n - 1), which the
        binomial theorem expands into products of something of a and the same of b: with B_j(a) the
        probability of j draws of a,

            Cov_ab = sum_j>0 (-1)^j B_j(a) B_j(b) / binom(n, j)        a != b

        It gives the diagonal (1 - 2 p)^n - (1 - p)^2n, and (1 - p)^n - (1 - p)^2n is to be there.
        """
        n, p = self.draws, self.drawn
        never = torch.log1p(-p)
        # (1 - p)^n - (1 - 2 p)^n; of rare ids as a product, for the difference rounds to 0.
        rare = -(n * never).exp() * torch.expm1(n * torch.log1p(-p.clamp(max=0.5) / (1 - p)))
        missing = torch.where(p < 0.5, rare, (n * never).exp() - (1 - 2 * p) ** n)
        total = (squares * missing).sum(1)
        log_p = p.clamp(min=torch.finfo(p.dtype).tiny).log()
        for j in range(1, n + 1):
            ways = math.comb(n, j)
            if ways < 1 / ROUNDING:
                share = ways * (j * log_p + (n - j) * never).exp()
                total += (-1) ** j / ways * gradient(slopes * share, learner).square().sum(1)
        return total

    def probe(self, generator: torch.Generator | None = None) -> Float[Tensor, "n V"]:
        """Random counts of mean 0 with the covariance of the true ones."""
        coins = (self.coins * (1 - self.coins)).sqrt() * _signs(self.coins, generator)
        if self.distinct:
            return coins + self._distinct_probe(generator)
        return coins + math.sqrt(self.draws) * self._draw_probe(generator)

    def _draw_probe(self, generator: torch.Generator | None) -> Tensor:
        """Of one draw: (diag(sqrt p) - p sqrt(p)^T) has the square diag(p) - p p^T. What a row
        lacks to 1 is the probability of an outcome that is no id."""
        signed = self.drawn.sqrt() * _signs(self.drawn, generator)
        other = (1 - self.drawn.sum(1, keepdim=True)).clamp(min=0).sqrt()
        other = other * _signs(other, generator)
        return signed - self.drawn * (signed.sum(1, keepdim=True) + other)

    def _distinct_probe(self, generator: torch.Generator | None) -> Tensor:
        """Presence is 1 - prod_i ((1 - p) - (1[draw i] - p)), expanded by how many of the second
        terms a product holds. These orders are uncorrelated, and the covariance of order j is
        binom(n, j) ((1 - p_a) (1 - p_b))^(n - j) times the j-th power of that of one draw, entry by
        entry: that of a product of j independent probes of a draw."""
        n, total = self.draws, torch.zeros_like(self.drawn)
        product = torch.ones_like(total)
        for j in range(1, min(n, ORDERS) + 1):
            product = product * self._draw_probe(generator)
            sign = _signs(total[:, :1], generator)
            rest = ((n - j) * torch.log1p(-self.drawn)).exp()
            total += sign * math.sqrt(math.comb(n, j)) * rest * product
        return total


def moments(cache: Cache, logprobs: Float[Tensor, "n V"]) -> Moments | None:
    """Those of a cache that draws ids of the distribution of who chooses them; None of a cache that
    draws none."""
    p = logprobs.double().exp()
    p = p / p.sum(1, keepdim=True)
    # So near to 1 that it makes no difference, and log(1 - p) is finite.
    p = p.clamp(max=1 - ROUNDING * 2)
    nothing = torch.zeros_like(p)
    match cache:
        case Sampled():
            return Moments(nothing, p, 1)
        case MultiSample(n=n, distinct=distinct):
            return Moments(nothing, p, n, distinct)
        case TeacherMultiSample(n=n):
            return Moments(nothing, p, n)
        case Poisson(n=n, alpha=alpha, top_k=k):
            pi = inclusion_log_probability(logprobs.double(), n, alpha).exp()
            return Moments(torch.where(likeliest(logprobs, k), 1.0, pi), nothing)
        case TopKTail(k=k, n=n, alpha=alpha):
            inside = likeliest(logprobs, k)
            thinned = inclusion_log_probability(logprobs.double(), n, alpha).exp() if n else 1.0
            return Moments(inside * thinned, torch.where(inside, 0.0, p), 1)
        case _:
            return None


def likeliest(logprobs: Float[Tensor, "n V"], k: int) -> Tensor:
    """Which ids are among the k likeliest of their row. [n, V]"""
    top = logprobs.topk(min(k, logprobs.shape[1])).indices
    return torch.zeros_like(logprobs, dtype=torch.bool).scatter(1, top, True)


def gradient(
    coefficients: Float[Tensor, "n V"], learner: Float[Tensor, "n V"]
) -> Float[Tensor, "n V"]:
    """sum_a coefficient_a (e_a - learner): of sum_a coefficient_a log p(a), by the logits."""
    return coefficients - learner * coefficients.sum(1, keepdim=True)


def _squared_norms(learner: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
    """|e_a - learner|^2 of every a."""
    others = learner.square().sum(1, keepdim=True) - learner.square()
    return (1 - learner).square() + others


def _signs(like: Tensor, generator: torch.Generator | None) -> Tensor:
    bits = torch.randint(2, like.shape, dtype=torch.int8, device=like.device, generator=generator)
    return (2 * bits - 1).to(like.dtype)
