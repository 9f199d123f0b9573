"""The losses of on-policy distillation, computed from a finite cache of teacher scores.

    sampler or teacher   draw_poisson, top_k_support   which ids are cached at each token
    cache                Support                       these ids and their scores, ragged
    learner              loss_of(estimator)            -> per-token loss and statistics

At a fixed prefix, p is the learner, p_old the sampler when it emitted the token, q the teacher,
and A(a) = log q(a) - log p(a), always without gradient.

Reverse KL, sum_a p(a) (log p(a) - log q(a)), weighs each cached id by the inverse of the
probability pi(a) that it was cached (Horvitz and Thompson):

    l = - sum_{a cached} w(a) A(a)        w(a) = min(p(a) / pi(a), max_ratio)
    gradient of l = - sum_{a cached} w(a) A(a) dlog p(a)

    sampled: pi = p_old(y), so w is the importance ratio of the emitted token y
    poisson: pi = min(1, (n p_old)^alpha)
    dense:   pi = 1

Without a cap both lines are unbiased, for the KL and for its gradient, however stale p_old is.
So the loss is the KL that a person wants to see, though one token's may be negative. Two ways to
get the gradient wrong, and why w and A are constants here:

- Differentiating A as well adds sum w(a) dlog p(a). Over a vocabulary that is zero; over one cache
  it is noise, even where student and teacher agree, and with capped or missing ids it is a bias.
- Differentiating min() gives capped ids no gradient, and those are the ids that moved most.
  A cap here shrinks the step on an id and never removes it.

Forward KL, sum_a q(a) (log q(a) - log p(a)), takes the teacher's k likeliest ids S and one bucket
for all others. It is the KL of a coarser pair of distributions: at least 0, at most the whole KL,
and meaningful at k = 1. Without the bucket it could be negative.

Left out: masks (callers pass only the tokens that count), the division by the number of tokens in
the step, which a part of a step can't know, and logging.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from engine.config import Dense, ForwardKL, Poisson, ReverseKL, Sampled

# Engines that can't send -inf send -9999 in its place. No log-softmax comes near it.
IMPOSSIBLE = -9999.0

# Ids less likely to be cached than this share their random numbers (see draw_poisson). Far above,
# too many numbers are drawn; far below, too many ids need one of their own. It changes no
# probability.
RARE = 1 / 32


@dataclass(frozen=True, eq=False)
class Support:
    """What is cached of n tokens: token i owns the entries offsets[i]:offsets[i+1] of m.

    A token may own none. For `sampled` it owns one, the emitted token; for `dense` it owns the
    vocabulary in order, and `ids` is empty. The order of a token's ids doesn't matter, but they
    must be distinct. `offsets` may stay on the CPU, so that slicing never waits for a GPU.
    """

    offsets: Int[Tensor, " n+1"]
    ids: Int[Tensor, " m"]
    """Cached ids; empty for `dense`."""
    sampler_logprobs: Float[Tensor, " m"]
    """log p_old at the ids; empty where the teacher chose them, and for `dense`."""
    teacher_logprobs: Float[Tensor, " m"]
    """log q at the ids."""
    token_ids: Int[Tensor, " n"]
    """The emitted tokens."""
    token_sampler_logprobs: Float[Tensor, " n"]
    """log p_old of the emitted tokens."""

    def __post_init__(self) -> None:
        n, m = len(self.token_ids), len(self.teacher_logprobs)
        fits = (
            len(self.offsets) == n + 1
            and len(self.token_sampler_logprobs) == n
            and len(self.ids) in (0, m)
            and len(self.sampler_logprobs) in (0, m)
        )
        if not fits:
            sizes = {name: len(value) for name, value in vars(self).items()}
            raise ValueError(f"columns of a support disagree about their lengths: {sizes}")

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, tokens: slice) -> "Support":
        """The tokens start:stop with their entries."""
        start, stop, step = tokens.indices(len(self))
        if step != 1:
            raise ValueError(f"a support is cut into contiguous parts; got a step of {step}")
        stop = max(start, stop)
        offsets = self.offsets[start : stop + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        return Support(
            offsets=offsets - first,
            ids=self.ids[first:last],  # an empty column stays empty
            sampler_logprobs=self.sampler_logprobs[first:last],
            teacher_logprobs=self.teacher_logprobs[first:last],
            token_ids=self.token_ids[start:stop],
            token_sampler_logprobs=self.token_sampler_logprobs[start:stop],
        )

    @property
    def is_dense(self) -> bool:
        """Whether each token owns the vocabulary."""
        return len(self.ids) == 0 and len(self.teacher_logprobs) > 0

    @cached_property
    def rows(self) -> Int[Tensor, " m"]:
        """The token that owns each entry."""
        counts = self.offsets.diff()
        rows = torch.repeat_interleave(counts, output_size=len(self.teacher_logprobs))
        return rows.to(self.teacher_logprobs.device)

    def gather(self, logprobs: Float[Tensor, "n V"]) -> Float[Tensor, " m"]:
        """One value of each entry, from one of each token and id."""
        return logprobs.reshape(-1) if self.is_dense else logprobs[self.rows, self.ids]

    def sum(self, entries: Float[Tensor, " m"]) -> Float[Tensor, " n"]:
        """Sums over the entries of each token; 0 for a token without any."""
        if self.is_dense:
            return entries.reshape(len(self), -1).sum(1)
        return entries.new_zeros(len(self)).index_add(0, self.rows, entries)


Loss = Callable[
    [Float[Tensor, "n V"], Support], tuple[Float[Tensor, " n"], dict[str, Float[Tensor, " n"]]]
]
"""(learner log-softmax over the vocabulary, support) -> (loss, statistics) of each token.

Statistics, without gradient:
kl          estimate of the divergence, the value of the loss
entropy     of the learner, in nats
ratio       p / p_old of the emitted token: 1 when fresh
kept        cached ids that entered the loss
impossible  cached ids left out because learner, sampler or teacher gives them probability 0
covered     learner's probability of the kept ids: how much of p the cache sees
"""


def loss_of(estimator: ReverseKL | ForwardKL) -> Loss:
    """The loss that a configuration names."""
    if isinstance(estimator, ForwardKL):
        return forward_kl
    match estimator.cache:
        case Dense():
            return reverse_kl
        case Sampled():
            return partial(reverse_kl, log_inclusion=_drawn_once)
        case Poisson(n=n, alpha=alpha, max_ratio=max_ratio):
            log_inclusion = partial(inclusion_log_probability, n=n, alpha=alpha)
            return partial(reverse_kl, log_inclusion=log_inclusion, max_ratio=max_ratio)


def reverse_kl(
    learner_logprobs: Float[Tensor, "n V"],
    support: Support,
    log_inclusion: Callable[[Tensor], Tensor] | None = None,
    max_ratio: float | None = None,
) -> tuple[Float[Tensor, " n"], dict[str, Float[Tensor, " n"]]]:
    """KL(learner || teacher) from ids that were cached with known probabilities.

    `log_inclusion` maps log p_old to log pi; None says that the whole vocabulary is cached.
    `max_ratio` caps p / pi, in value and gradient alike.
    """
    _refuse_unknown_inclusion(support, dense=log_inclusion is None)
    log_p, log_q = support.gather(learner_logprobs), support.teacher_logprobs
    log_p_old = support.sampler_logprobs if log_inclusion else log_q
    possible = _possible(log_p, log_q, log_p_old)
    log_p, log_q, log_p_old = (torch.where(possible, x, 0.0) for x in (log_p, log_q, log_p_old))

    log_pi = log_inclusion(log_p_old) if log_inclusion else torch.zeros_like(log_p_old)
    log_weight = log_p.detach() - log_pi
    if max_ratio is not None:
        log_weight = log_weight.clamp(max=math.log(max_ratio))
    signal = log_q - log_p.detach()
    one = (log_p - log_p.detach()).exp()  # 1, with the gradient of log p
    loss = -support.sum(log_weight.exp() * signal * one)
    return loss, _statistics(learner_logprobs, support, loss, log_p, possible)


def forward_kl(
    learner_logprobs: Float[Tensor, "n V"], support: Support
) -> tuple[Float[Tensor, " n"], dict[str, Float[Tensor, " n"]]]:
    """KL(teacher || learner) over the cached ids and one bucket for all others.

    Exact when the whole vocabulary is cached; then the bucket is empty.
    """
    log_p, log_q = support.gather(learner_logprobs), support.teacher_logprobs
    possible = _possible(log_p, log_q)
    log_p, log_q = (torch.where(possible, x, 0.0) for x in (log_p, log_q))
    loss = support.sum(log_q.exp() * (log_q - log_p))
    if not support.is_dense:
        teacher_rest = 1 - support.sum(torch.where(possible, log_q.exp(), 0.0))
        loss = loss + _rest(learner_logprobs, support, possible, teacher_rest.clamp(min=0))
    return loss, _statistics(learner_logprobs, support, loss, log_p, possible)


def _rest(
    learner_logprobs: Float[Tensor, "n V"],
    support: Support,
    possible: Bool[Tensor, " m"],
    teacher_rest: Float[Tensor, " n"],
) -> Float[Tensor, " n"]:
    """(1-Q) (log(1-Q) - log(1-P)): the bucket of the ids outside the support.

    1-P is summed over these ids: as a difference it is 0 for a student sure of the cached ids, who
    then would never learn of the others.
    """
    inside = torch.zeros_like(learner_logprobs, dtype=torch.bool)
    inside[support.rows, support.ids] = possible
    empty = (inside | (learner_logprobs.detach() <= IMPOSSIBLE)).all(1)
    # A row without a bucket stays whole, so that its log-sum-exp has a finite gradient.
    outside = learner_logprobs.masked_fill(inside & ~empty[:, None], -torch.inf)
    terms = torch.xlogy(teacher_rest, teacher_rest) - teacher_rest * outside.logsumexp(1)
    return torch.where(empty, 0.0, terms)


def _statistics(
    learner_logprobs: Float[Tensor, "n V"],
    support: Support,
    loss: Float[Tensor, " n"],
    log_p: Float[Tensor, " m"],
    possible: Bool[Tensor, " m"],
) -> dict[str, Float[Tensor, " n"]]:
    learner_logprobs, log_p = learner_logprobs.detach(), log_p.detach()
    emitted = learner_logprobs.gather(1, support.token_ids[:, None]).squeeze(1)
    return {
        "kl": loss.detach(),
        "entropy": torch.special.entr(learner_logprobs.exp()).sum(1),
        "ratio": (emitted - support.token_sampler_logprobs).exp(),
        "kept": support.sum(possible.to(log_p.dtype)),
        "impossible": support.sum((~possible).to(log_p.dtype)),
        "covered": support.sum(torch.where(possible, log_p.exp(), 0.0)),
    }


def _possible(*logprobs: Tensor) -> Bool[Tensor, " m"]:
    """Where every log-probability is above -inf. Others must not meet a multiplication.

    NaN counts as possible: it is a fault, and has to reach the loss to be seen.
    """
    impossible = torch.zeros((), dtype=torch.bool, device=logprobs[0].device)
    for x in logprobs:
        impossible = impossible | (x.detach() <= IMPOSSIBLE)
    return ~impossible


def _refuse_unknown_inclusion(support: Support, dense: bool) -> None:
    if len(support.teacher_logprobs) == 0:
        return
    if dense and not support.is_dense:
        raise ValueError(
            "reverse_kl over a part of the vocabulary needs to know how the ids were chosen: "
            "set estimator.cache to the type that this cache was filled with"
        )
    if not dense and len(support.sampler_logprobs) == 0:
        raise ValueError(
            "this cache has no sampler log-probabilities, so the teacher chose its ids: "
            "set estimator.type to forward_kl, or fill the cache again with sampled or poisson"
        )


# Which ids are cached


def _drawn_once(sampler_logprobs: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
    """log pi of `sampled`: one draw finds an id with the sampler's own probability."""
    return sampler_logprobs


def inclusion_log_probability(
    sampler_logprobs: Float[Tensor, "*shape"], n: int, alpha: float
) -> Float[Tensor, "*shape"]:
    """log pi of `poisson`: log min(1, (n p_old)^alpha)."""
    return (alpha * (sampler_logprobs + math.log(n))).clamp(max=0)


def draw_poisson(
    sampler_logprobs: Float[Tensor, "rows V"],
    n: int,
    alpha: float,
    generator: torch.Generator | None = None,
) -> tuple[Int[Tensor, " rows"], Int[Tensor, " m"], Float[Tensor, " m"]]:
    """Keeps every id of every row independently, with its inclusion probability.

    Returns how many ids each row kept, and these ids and their log p_old, row by row.

    A random number for each id of a large vocabulary costs several log-softmaxes, and nearly all
    say no. So ids with pi <= RARE are first thinned to a fraction RARE, by drawing the gaps
    between survivors, and survivors are kept with probability pi / RARE. The product is pi.
    """
    rows, vocabulary = sampler_logprobs.shape
    logprobs = sampler_logprobs.reshape(-1)
    bound = math.log(RARE) / alpha - math.log(n)  # here pi = RARE
    likely = (logprobs > bound).nonzero().squeeze(1)
    rare = _thin(len(logprobs), RARE, logprobs.device, generator)
    rare = rare[logprobs[rare] <= bound]

    entries = torch.cat([likely, rare])
    # In float64, whose random numbers don't round a small probability up.
    pi = inclusion_log_probability(logprobs[entries].double(), n, alpha).exp()
    pi[len(likely) :] /= RARE
    uniforms = torch.rand(pi.shape, dtype=pi.dtype, device=pi.device, generator=generator)
    entries = entries[uniforms < pi].sort().values
    counts = torch.bincount(entries // max(vocabulary, 1), minlength=rows)
    return counts, entries % max(vocabulary, 1), logprobs[entries]


def _thin(
    size: int, probability: float, device: torch.device, generator: torch.Generator | None
) -> Int[Tensor, " survivors"]:
    """Those of range(size) that survive, each independently with the given probability."""
    survivors = torch.zeros(1, dtype=torch.int64, device=device)
    mean = size * probability
    draws = int(mean + math.sqrt(mean)) + 1  # mostly enough
    while survivors[-1] < size:
        gaps = torch.empty(draws, dtype=torch.int64, device=device)
        gaps.geometric_(probability, generator=generator)
        survivors = torch.cat([survivors, survivors[-1] + gaps.cumsum(0)])
    survivors = survivors[1:] - 1
    return survivors[survivors < size]


def top_k_support(
    teacher_logprobs: Float[Tensor, "rows V"], k: int
) -> tuple[Int[Tensor, " rows"], Int[Tensor, " m"], Float[Tensor, " m"]]:
    """The k likeliest ids of every row, in the form of `draw_poisson`; all, if there are fewer."""
    rows, vocabulary = teacher_logprobs.shape
    logprobs, ids = teacher_logprobs.topk(min(k, vocabulary))
    counts = torch.full((rows,), ids.shape[1], device=ids.device)
    return counts, ids.reshape(-1), logprobs.reshape(-1)
