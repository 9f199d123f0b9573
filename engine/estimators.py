"""The losses of on-policy distillation, computed from a finite cache of teacher scores.

    loss_of(estimator)(learner log-softmax, support) -> loss and statistics of each token

At a fixed prefix, p is the learner, p_old the sampler when it emitted the token, q the teacher,
and A(a) = log q(a) - log p(a), always without gradient. There are two ways to make a divergence
out of a part of the vocabulary:

**Expanded sums** (`reverse_kl`, `jensen_shannon`). Each cached id stands for 1/pi(a) others, pi(a)
being the probability that it was cached, see engine.support. For the reverse KL,

    l = - sum_{a cached} w(a) A(a)        w(a) = min(p(a) / pi(a), max_ratio)
    gradient of l = - sum_{a cached} w(a) A(a) dlog p(a)

Without a cap both lines are unbiased, for the KL and for its gradient, however stale p_old is.
So the loss is the KL that a person wants to see, though one token's may be negative. Two ways to
get the gradient wrong, and why w and A are constants here:

- Differentiating A as well adds sum w(a) dlog p(a). Over a vocabulary that is zero; over one cache
  it is noise, even where student and teacher agree, and with capped or missing ids it is a bias.
- Differentiating min() gives capped ids no gradient, and those are the ids that moved most.
  A cap here shrinks the step on an id and never removes it.

**Coarse divergences** (`coarse`). The k likeliest ids S and one bucket for all others are a coarser
pair of distributions, whose divergence is at least 0, at most the whole one, and meaningful at
k = 1. Everything is differentiated. Without the bucket it could be negative.

The stabilisers of the field are selectable for the reverse KL, for comparison: AsyncOPD
(arXiv 2606.24143) with PPO's clip (1707.06347), AReaL's decoupled one (2505.24298), M2PO
(2510.01161).

Left out: masks (callers pass only the tokens that count), the division by the number of tokens in
the step, which a part of a step can't know, and logging.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from engine.config import (
    M2PO,
    Cache,
    Clipped,
    Decoupled,
    Dense,
    Estimator,
    ForwardKL,
    JensenShannon,
    MultiSample,
    Poisson,
    ReverseKL,
    Stabiliser,
    StudentTopK,
    TeacherHidden,
    TeacherMultiSample,
    TopKTail,
    Unclipped,
    is_whole,
)
from engine.support import Support, log_expansion

# Engines that can't send -inf send -9999 in its place. No log-softmax comes near it.
IMPOSSIBLE = -9999.0

PLAIN = Unclipped()

Losses = tuple[Float[Tensor, " n"], dict[str, Float[Tensor, " n"]]]

Loss = Callable[[Float[Tensor, "n V"], Support], Losses]
"""(learner log-softmax over the vocabulary, support) -> (loss, statistics) of each token.

Statistics, without gradient:
kl          estimate of the divergence
entropy     of the learner, in nats
ratio       p / p_old of the emitted token: 1 when fresh
kept        cached ids that entered the loss
impossible  cached ids left out because learner, sampler or teacher gives them probability 0
covered     learner's probability of the kept ids: how much of p the cache sees
clipped     kept ids whose weight was capped, or whose gradient a stabiliser took away
"""

Divergence = Callable[[Tensor, Tensor], Tensor]
"""(log p, log q) of ids or buckets -> their terms of a sum."""


def loss_of(estimator: Estimator, bound: float = math.inf) -> Loss:
    """The loss that a configuration names. `bound` is M2PO's of this update, see `m2po_bound`."""
    cache = estimator.cache
    match estimator:
        case ReverseKL(cache=StudentTopK()):
            return partial(coarse, cache=cache, divergence=reverse_terms)
        case ReverseKL(stabiliser=stabiliser):
            return partial(reverse_kl, cache=cache, stabiliser=stabiliser, bound=bound)
        case ForwardKL(cache=TeacherMultiSample(n=n)):
            return partial(forward_draws, n=n)
        case ForwardKL() | JensenShannon(beta=0):
            return partial(coarse, cache=cache, divergence=forward_terms)
        case JensenShannon(beta=beta, cache=Poisson() | Dense() | TeacherHidden()):
            return partial(jensen_shannon, cache=cache, beta=beta)
        case JensenShannon(beta=beta):
            return partial(coarse, cache=cache, divergence=partial(jsd_terms, beta=beta))


# Expanded sums


def reverse_kl(
    learner_logprobs: Float[Tensor, "n V"],
    support: Support,
    cache: Cache,
    stabiliser: Stabiliser = PLAIN,
    bound: float = math.inf,
) -> Losses:
    """KL(learner || teacher) from ids that were cached with known probabilities.

    A stabiliser changes the loss and its gradient; the statistic `kl` stays the divergence."""
    _refuse_other_caches(support, cache)
    whole = support.is_dense and stabiliser == PLAIN
    if whole and _all_possible(learner_logprobs, support.teacher_logprobs):
        return _whole_reverse_kl(learner_logprobs, support)
    log_p, log_q, log_p_old, possible = _entries(learner_logprobs, support, cache)
    log_weight = log_p.detach() + log_expansion(cache, support, log_p_old)
    log_weight, clipped = _capped(log_weight, cache)
    kl = log_weight.exp() * (log_p.detach() - log_q)
    value = slope = kl
    if stabiliser != PLAIN:
        terms = _Terms(log_weight, log_p.detach(), log_p_old, log_q, support.proximal_logprobs)
        value, slope, clipped = terms.stabilised(stabiliser, bound)
    loss = _sum(support, value, slope, log_p)
    return loss, _statistics(learner_logprobs, support, support.sum(kl), log_p, possible, clipped)


def _whole_reverse_kl(learner_logprobs: Float[Tensor, "n V"], support: Support) -> Losses:
    """The same over the whole vocabulary, in as few passes over [n, V] as there can be."""
    log_p = learner_logprobs.detach()
    p = log_p.exp()
    slope = (log_p - support.teacher_logprobs.view_as(log_p)).mul_(p)
    kl = slope.sum(1)
    moving = torch.linalg.vecdot(slope, learner_logprobs)
    ones = torch.ones_like(kl)
    return kl + moving - moving.detach(), {
        "kl": kl,
        "entropy": -torch.linalg.vecdot(p, log_p),
        "ratio": _ratio(log_p, support),
        "kept": ones * log_p.shape[1],
        "impossible": 0 * ones,
        "covered": ones,
        "clipped": 0 * ones,
    }


def jensen_shannon(
    learner_logprobs: Float[Tensor, "n V"], support: Support, cache: Cache, beta: float
) -> Losses:
    """Generalised Jensen-Shannon divergence (GKD, arXiv 2306.13649) for 0 < beta <= 1.

    With m = beta q + (1 - beta) p its derivative by p(a) is (1 - beta) log(p(a) / m(a)): the
    mixture bounds the signal where the student has no mass, so that the student's draws can carry
    it."""
    _refuse_other_caches(support, cache)
    if beta == 1:
        return reverse_kl(learner_logprobs, support, cache)
    log_p, log_q, log_p_old, possible = _entries(learner_logprobs, support, cache)
    expansion = log_expansion(cache, support, log_p_old)
    log_weight, clipped = _capped(log_p.detach() + expansion, cache)
    log_m = _mixture(log_p.detach(), log_q, beta)
    slope = (1 - beta) * log_weight.exp() * (log_p.detach() - log_m)
    value = slope + beta * (log_q + expansion).exp() * (log_q - log_m)
    loss = _sum(support, value, slope, log_p)
    return loss, _statistics(learner_logprobs, support, loss, log_p, possible, clipped)


def forward_draws(learner_logprobs: Float[Tensor, "n V"], support: Support, n: int) -> Losses:
    """KL(teacher || learner) from n draws of the teacher: unbiased, and no ratio to go stale."""
    log_p, log_q = support.gather(learner_logprobs), support.teacher_logprobs
    possible = possible_ids(log_p, log_q)
    log_p, log_q = (torch.where(possible, x, 0.0) for x in (log_p, log_q))
    loss = support.sum(support.draws.to(log_p.dtype) / n * (log_q - log_p))
    return loss, _statistics(learner_logprobs, support, loss, log_p, possible)


def _entries(
    learner_logprobs: Float[Tensor, "n V"], support: Support, cache: Cache
) -> tuple[Tensor, Tensor, Tensor, Bool[Tensor, " m"]]:
    """log p, log q and log p_old of each entry, 0 where one is impossible; and where none is."""
    log_p, log_q = support.gather(learner_logprobs), support.teacher_logprobs
    log_p_old = log_q if is_whole(cache) else support.sampler_logprobs
    possible = possible_ids(log_p, log_q, log_p_old)
    log_p, log_q, log_p_old = (torch.where(possible, x, 0.0) for x in (log_p, log_q, log_p_old))
    return log_p, log_q, log_p_old, possible


def _capped(log_weight: Tensor, cache: Cache) -> tuple[Tensor, Bool[Tensor, " m"]]:
    cap = cache.max_ratio if isinstance(cache, Poisson) else 0.0
    log_cap = math.log(cap) if cap else math.inf
    return log_weight.clamp(max=log_cap), log_weight > log_cap


def _sum(support: Support, value: Tensor, slope: Tensor, log_p: Tensor) -> Float[Tensor, " n"]:
    """Sum of the entries' values, whose gradient is that of sum slope(a) log p(a)."""
    return support.sum(value + slope * (log_p - log_p.detach()))


# Stabilisers


@dataclass(frozen=True)
class _Terms:
    """What the stabilisers work on, for m entries. None has a gradient."""

    log_weight: Tensor
    log_p: Tensor
    log_p_old: Tensor
    log_q: Tensor
    log_proximal: Tensor

    def signal(self, stabiliser: Stabiliser) -> Tensor:
        behind = self.log_p if stabiliser.signal == "learner" else self.log_p_old
        return self.log_q - behind

    def stabilised(
        self, stabiliser: Stabiliser, bound: float
    ) -> tuple[Tensor, Tensor, Bool[Tensor, " m"]]:
        """Value, slope, and which entries have lost their gradient."""
        log_ratio = self.log_p - self.log_p_old
        signal = self.signal(stabiliser)
        match stabiliser:
            case Unclipped(ratio=ratio):
                log_weight = self.log_weight if ratio else self.log_weight - log_ratio
                value = -log_weight.exp() * signal
                return value, value, torch.zeros_like(value, dtype=torch.bool)
            case Clipped(eps=eps):
                return _clip(self.log_weight, log_ratio, signal, 1 - eps, 1 + eps)
            case M2PO():
                return _clip(self.log_weight, log_ratio, signal, math.exp(-bound), math.exp(bound))
            case Decoupled(eps=eps, cap=cap):
                left_out = self.log_proximal - self.log_p_old > math.log(cap)
                value, slope, clipped = _clip(
                    self.log_weight, self.log_p - self.log_proximal, signal, 1 - eps, 1 + eps
                )
                value, slope = (torch.where(left_out, 0.0, x) for x in (value, slope))
                return value, slope, clipped | left_out


def _clip(
    log_weight: Tensor, log_ratio: Tensor, signal: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor, Bool[Tensor, " m"]]:
    """-min(r A, clip(r, low, high) A), times what the weight holds beside the ratio r."""
    ratio = log_ratio.exp()
    clipped = torch.where(signal > 0, ratio > high, (ratio < low) & (signal < 0))
    unclipped = -log_weight.exp() * signal
    held = -(log_weight - log_ratio).exp() * ratio.clamp(low, high) * signal
    return torch.maximum(unclipped, held), torch.where(clipped, 0.0, unclipped), clipped


def m2po_bound(
    log_ratios: Float[Tensor, " m"], signals: Float[Tensor, " m"], budget: float
) -> float:
    """The widest bound on |log p/p_old| under which the mean square of the log ratios of a whole
    update's ids, of those that move in the direction that their signal rewards, is within budget.
    Infinite where nothing needs a clip. Finite inputs only."""
    harmful = log_ratios[log_ratios * signals > 0].abs().double().sort().values
    if len(harmful) == 0:
        return math.inf
    counts = torch.arange(1, len(harmful) + 1, device=harmful.device)
    within = int((harmful.square().cumsum(0) / counts <= budget).sum())
    if within == len(harmful):
        return math.inf
    return harmful[within - 1].item() if within else 0.0


def proximal_logprobs(learner_logprobs: Float[Tensor, "n V"], support: Support) -> Losses:
    """In the form of a loss, so that it runs through the chunked head: log p of each entry, as the
    statistic `log_p` [m]."""
    log_p = support.gather(learner_logprobs.detach())
    return log_p.new_zeros(len(support)), {"log_p": log_p}


# Coarse divergences


def coarse(
    learner_logprobs: Float[Tensor, "n V"],
    support: Support,
    cache: Cache,
    divergence: Divergence,
) -> Losses:
    """A divergence over the cached ids and one bucket for all others, or renormalised over the
    cached ids. Exact when the whole vocabulary is cached; then the bucket is empty."""
    log_p, log_q = support.gather(learner_logprobs), support.teacher_logprobs
    possible = possible_ids(log_p, log_q)
    log_p, log_q = (torch.where(possible, x, 0.0) for x in (log_p, log_q))
    if isinstance(cache, StudentTopK) and cache.rest == "renormalise":
        terms = divergence(*(x - _log_total(x, support, possible) for x in (log_p, log_q)))
        loss = support.sum(torch.where(possible, terms, 0.0))
    else:
        loss = support.sum(torch.where(possible, divergence(log_p, log_q), 0.0))
        if not support.is_dense:
            loss = loss + _bucket(learner_logprobs, support, possible, log_q, divergence)
    return loss, _statistics(learner_logprobs, support, loss, log_p, possible)


def forward_terms(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Of KL(q || p)."""
    return log_q.exp() * (log_q - log_p)


def reverse_terms(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Of KL(p || q)."""
    return log_p.exp() * (log_p - log_q)


def jsd_terms(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Of beta KL(q || m) + (1 - beta) KL(p || m), for 0 < beta <= 1; of KL(p || q) at 1."""
    if beta == 1:
        return reverse_terms(log_p, log_q)
    log_m = _mixture(log_p, log_q, beta)
    return beta * forward_terms(log_m, log_q) + (1 - beta) * reverse_terms(log_p, log_m)


def _mixture(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))


def _log_total(
    logprobs: Float[Tensor, " m"], support: Support, possible: Bool[Tensor, " m"]
) -> Float[Tensor, " m"]:
    """log of the sum over the token's possible ids, at each of its entries."""
    total = support.sum(torch.where(possible, logprobs.exp(), 0.0))
    return total.clamp(min=torch.finfo(total.dtype).tiny).log()[support.rows]


def _bucket(
    learner_logprobs: Float[Tensor, "n V"],
    support: Support,
    possible: Bool[Tensor, " m"],
    log_q: Float[Tensor, " m"],
    divergence: Divergence,
) -> Float[Tensor, " n"]:
    """The term of the ids outside the support.

    1-P is summed over these ids: as a difference it is 0 for a student sure of the cached ids, who
    then would never learn of the others. Of 1-Q only the difference is known; below the type's
    rounding error nothing is."""
    teacher_rest = 1 - support.sum(torch.where(possible, log_q.exp(), 0.0))
    log_q_rest = teacher_rest.clamp(min=torch.finfo(log_q.dtype).eps).log()
    inside = torch.zeros_like(learner_logprobs, dtype=torch.bool)
    inside[support.rows, support.ids] = possible
    empty = (inside | (learner_logprobs.detach() <= IMPOSSIBLE)).all(1)
    # A row without a bucket stays whole, so that its log-sum-exp has a finite gradient.
    outside = learner_logprobs.masked_fill(inside & ~empty[:, None], -torch.inf)
    return torch.where(empty, 0.0, divergence(outside.logsumexp(1), log_q_rest))


def _statistics(
    learner_logprobs: Float[Tensor, "n V"],
    support: Support,
    kl: Float[Tensor, " n"],
    log_p: Float[Tensor, " m"],
    possible: Bool[Tensor, " m"],
    clipped: Bool[Tensor, " m"] | None = None,
) -> dict[str, Float[Tensor, " n"]]:
    learner_logprobs, log_p = learner_logprobs.detach(), log_p.detach()
    clipped = torch.zeros_like(possible) if clipped is None else clipped & possible
    return {
        "kl": kl.detach(),
        "entropy": torch.special.entr(learner_logprobs.exp()).sum(1),
        "ratio": _ratio(learner_logprobs, support),
        "kept": support.sum(possible.to(log_p.dtype)),
        "impossible": support.sum((~possible).to(log_p.dtype)),
        "covered": support.sum(torch.where(possible, log_p.exp(), 0.0)),
        "clipped": support.sum(clipped.to(log_p.dtype)),
    }


def _ratio(log_p: Float[Tensor, "n V"], support: Support) -> Float[Tensor, " n"]:
    """Of the emitted tokens."""
    emitted = log_p.gather(1, support.token_ids[:, None]).squeeze(1)
    return (emitted - support.token_sampler_logprobs).exp()


def _all_possible(*logprobs: Tensor) -> bool:
    """Whether none is as good as -inf; with NaN, no."""
    return all(x.detach().amin().item() > IMPOSSIBLE for x in logprobs if len(x))


def possible_ids(*logprobs: Tensor) -> Bool[Tensor, " m"]:
    """Where every log-probability is above -inf. Others must not meet a multiplication.

    NaN counts as possible: it is a fault, and has to reach the loss to be seen.
    """
    impossible = torch.zeros((), dtype=torch.bool, device=logprobs[0].device)
    for x in logprobs:
        impossible = impossible | (x.detach() <= IMPOSSIBLE)
    return ~impossible


def _refuse_other_caches(support: Support, cache: Cache) -> None:
    """A sum that is expanded by the wrong probabilities would be wrong without a sign of it."""
    if len(support.teacher_logprobs) == 0:
        return
    if is_whole(cache):
        if not support.is_dense:
            raise ValueError(
                "a sum over the whole vocabulary got a part of it, and how its ids were chosen is "
                "not known: set estimator.cache to the type that this cache was filled with"
            )
    elif len(support.sampler_logprobs) == 0:
        raise ValueError(
            "this cache has no sampler log-probabilities, so the teacher chose its ids: "
            "set estimator.type to forward_kl, or fill the cache again with sampled or poisson"
        )
    elif isinstance(cache, MultiSample | TopKTail) and len(support.draws) == 0:
        raise ValueError(
            f"this cache doesn't say how often its ids were drawn, so it isn't {cache.type}'s: "
            "set estimator.cache to the type that it was filled with"
        )
