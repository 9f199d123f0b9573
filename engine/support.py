"""The finite cache of a distribution: which ids are kept at a token, how, and in which layout.

    choose(cache, log p_old, emitted)   sampler: the ids that it keeps at each token
    choose(cache, log q)                teacher: the ids that it keeps, where it does the choosing
    Support                             learner: these ids with the scores of both, ragged
    log_expansion(cache, support)       learner: by how much each kept id stands for others

Every kept id a has a weight c(a) / pi(a): how often it came up, over how often that was expected.
The sum of any function f over the kept ids, each times its weight, then has the sum of f over the
whole vocabulary as its mean (Horvitz and Thompson):

    sampled         pi = p_old(y)                         the emitted token alone
    multi_sample    pi = n p_old, c = count               n draws with replacement
      distinct      pi = 1 - (1 - p_old)^n                the same draws, each id once
    poisson         pi = min(1, (n p_old)^alpha)          each id by a coin of its own
    top_k_tail      pi = 1 of the top k, p_old outside    exact above, one draw for the rest
    dense           pi = 1, and so where the learner makes q of the teacher's hidden state
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.config import (
    Cache,
    Dense,
    MultiSample,
    Poisson,
    Sampled,
    StudentTopK,
    TeacherHidden,
    TeacherMultiSample,
    TeacherTopK,
    TopKTail,
)

# Ids less likely to be kept than this share their random numbers (see `_coins`). Far above, too
# many numbers are drawn; far below, too many ids need one of their own. It changes no probability.
RARE = 1 / 32


def _nothing() -> Tensor:
    return torch.zeros(0)


@dataclass(frozen=True, eq=False)
class Support:
    """What is cached of n tokens: token i owns the entries offsets[i]:offsets[i+1] of m.

    A token may own none. For `sampled` it owns one, the emitted token; for `dense` it owns the
    vocabulary in order, and `ids` is empty. A token's ids are distinct. `offsets` may stay on the
    CPU, so that slicing never waits for a GPU.
    """

    offsets: Int[Tensor, " n+1"]
    ids: Int[Tensor, " m"]
    """Cached ids; empty for `dense`. Ids kept for certain come first."""
    sampler_logprobs: Float[Tensor, " m"]
    """log p_old at the ids; empty where the teacher chose them, and for `dense`."""
    teacher_logprobs: Float[Tensor, " m"]
    """log q at the ids."""
    token_ids: Int[Tensor, " n"]
    """The emitted tokens."""
    token_sampler_logprobs: Float[Tensor, " n"]
    """log p_old of the emitted tokens."""
    draws: Int[Tensor, " m"] = field(default_factory=_nothing)
    """How often each id was drawn with replacement, 0 where it was kept in another way; empty
    where nothing is drawn so."""
    proximal_logprobs: Float[Tensor, " m"] = field(default_factory=_nothing)
    """log p at the ids when the step began; empty unless a stabiliser asks for it."""
    teacher_hidden: Float[Tensor, "n D"] = field(default_factory=_nothing)
    """The teacher's last hidden states, of which `scored` makes a dense support; else empty."""

    def __post_init__(self) -> None:
        n, m = len(self.token_ids), len(self.teacher_logprobs)
        fits = (
            len(self.offsets) == n + 1
            and len(self.token_sampler_logprobs) == n
            and len(self.teacher_hidden) in (0, n)
            and all(len(column) in (0, m) for _, column in self._entries())
        )
        if not fits:
            sizes = {f.name: len(getattr(self, f.name)) for f in fields(self)}
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
        return replace(
            self,
            offsets=offsets - first,
            token_ids=self.token_ids[start:stop],
            token_sampler_logprobs=self.token_sampler_logprobs[start:stop],
            teacher_hidden=self.teacher_hidden[start:stop],
            # An empty column stays empty.
            **{name: column[first:last] for name, column in self._entries()},
        )

    def scored(self, teacher_logprobs: Float[Tensor, "n V"]) -> "Support":
        """With the teacher's whole vocabulary in place of its hidden states."""
        n, vocabulary = teacher_logprobs.shape
        return replace(
            self,
            offsets=torch.arange(n + 1) * vocabulary,
            teacher_logprobs=teacher_logprobs.reshape(-1),
            teacher_hidden=_nothing(),
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

    @cached_property
    def ranks(self) -> Int[Tensor, " m"]:
        """The place of each entry among its token's."""
        starts = self.offsets[:-1].to(self.rows.device)[self.rows]
        return torch.arange(len(self.rows), device=self.rows.device) - starts

    def gather(self, logprobs: Float[Tensor, "n V"]) -> Float[Tensor, " m"]:
        """One value of each entry, from one of each token and id."""
        return logprobs.reshape(-1) if self.is_dense else logprobs[self.rows, self.ids]

    def sum(self, entries: Float[Tensor, " m"]) -> Float[Tensor, " n"]:
        """Sums over the entries of each token; 0 for a token without any."""
        if self.is_dense:
            return entries.reshape(len(self), -1).sum(1)
        return entries.new_zeros(len(self)).index_add(0, self.rows, entries)

    def _entries(self) -> Iterator[tuple[str, Tensor]]:
        """The columns with a value for each entry."""
        for name in ("ids", "sampler_logprobs", "teacher_logprobs", "draws", "proximal_logprobs"):
            yield name, getattr(self, name)


def log_expansion(
    cache: Cache, support: Support, sampler_logprobs: Float[Tensor, " m"]
) -> Float[Tensor, " m"]:
    """log(c / pi) of each entry: 0 where all ids are kept. `sampler_logprobs` are finite."""
    match cache:
        case Sampled():
            return -sampler_logprobs
        case MultiSample(n=n, distinct=True):
            return -_log_seen(sampler_logprobs, n)
        case MultiSample(n=n):
            return (support.draws.to(sampler_logprobs.dtype) / n).log() - sampler_logprobs
        case Poisson(n=n, alpha=alpha, top_k=top_k):
            log_pi = inclusion_log_probability(sampler_logprobs, n, alpha)
            return -torch.where(support.ranks < top_k, 0.0, log_pi)
        case TopKTail(n=n, alpha=alpha):
            thinned = inclusion_log_probability(sampler_logprobs, n, alpha) if n else 0.0
            return -torch.where(support.draws > 0, sampler_logprobs, thinned)
        case Dense() | TeacherHidden():
            return torch.zeros_like(sampler_logprobs)
        case TeacherMultiSample() | TeacherTopK() | StudentTopK():
            raise TypeError(f"the ids of {cache.type} don't stand for others")


def inclusion_log_probability(
    sampler_logprobs: Float[Tensor, "*shape"], n: int, alpha: float
) -> Float[Tensor, "*shape"]:
    """log pi of `poisson`: log min(1, (n p_old)^alpha)."""
    return (alpha * (sampler_logprobs + math.log(n))).clamp(max=0)


def _log_seen(sampler_logprobs: Float[Tensor, " m"], n: int) -> Float[Tensor, " m"]:
    """log(1 - (1 - p)^n): that an id is among n draws. In float64, where 1 - p doesn't round an
    almost certain id to a certain one, nor a rare one to never."""
    log_missed = n * torch.log1p(-sampler_logprobs.double().exp().clamp(max=1))
    return torch.log(-torch.expm1(log_missed)).to(sampler_logprobs.dtype)


# Which ids are kept


@dataclass(frozen=True)
class Chosen:
    """The ids kept of each row of a distribution, row by row."""

    counts: Int[Tensor, " rows"]
    ids: Int[Tensor, " m"]
    logprobs: Float[Tensor, " m"]
    """Of the model that chose."""
    draws: Int[Tensor, " m"]
    """As `Support.draws`."""


def choose(
    cache: Cache,
    logprobs: Float[Tensor, "rows V"],
    emitted: Int[Tensor, " rows"] | None = None,
    generator: torch.Generator | None = None,
) -> Chosen:
    """The ids that a cache keeps of the model that chooses them: the student, with the tokens that
    it emitted, or the teacher, without. None where all are, which needs no list of them."""
    match cache:
        case Sampled():
            assert emitted is not None
            return _of_rows(emitted[:, None], logprobs)
        case MultiSample(n=n):
            assert emitted is not None
            drawn = torch.cat([emitted[:, None], _draw(logprobs, n - 1, generator)], 1)
            return _counted(drawn, logprobs)
        case TeacherMultiSample(n=n):
            return _counted(_draw(logprobs, n, generator), logprobs)
        case StudentTopK(k=k) | TeacherTopK(k=k):
            return _of_rows(logprobs.topk(min(k, logprobs.shape[1])).indices, logprobs)
        case Poisson(n=n, alpha=alpha, top_k=top_k):
            kept = _coins(logprobs, n, alpha, generator)
            if top_k:
                top = logprobs.topk(min(top_k, logprobs.shape[1])).indices
                certain = _keys(top, logprobs.shape[1])
                kept = torch.cat([certain, kept[~torch.isin(kept, certain)]])
            return _of_keys(kept, logprobs)
        case TopKTail():
            assert emitted is not None
            return _top_and_tail(cache, logprobs, emitted, generator)
        case Dense() | TeacherHidden():
            return _of_keys(torch.zeros(0, dtype=torch.int64, device=logprobs.device), logprobs)


def _top_and_tail(
    cache: TopKTail,
    logprobs: Float[Tensor, "rows V"],
    emitted: Int[Tensor, " rows"],
    generator: torch.Generator | None,
) -> Chosen:
    top, ids = logprobs.topk(min(cache.k, logprobs.shape[1]))
    keys = _keys(ids, logprobs.shape[1])
    if cache.n:  # thinned: coins for the k only
        keys = keys[_coins(top, cache.n, cache.alpha, generator)]
    outside = (ids != emitted[:, None]).all(1)
    tail = _keys(emitted[:, None], logprobs.shape[1])[outside]
    draws = torch.cat([torch.zeros_like(keys), torch.ones_like(tail)])
    return _of_keys(torch.cat([keys, tail]), logprobs, draws)


# A key is row * V + id. It says of every kept id which row keeps it.


def _keys(ids: Int[Tensor, "rows k"], vocabulary: int) -> Int[Tensor, " m"]:
    rows = torch.arange(len(ids), device=ids.device)[:, None]
    return (rows * vocabulary + ids).reshape(-1)


def _of_rows(ids: Int[Tensor, "rows k"], logprobs: Float[Tensor, "rows V"]) -> Chosen:
    return _of_keys(_keys(ids, logprobs.shape[1]), logprobs)


def _of_keys(
    keys: Int[Tensor, " m"],
    logprobs: Float[Tensor, "rows V"],
    draws: Int[Tensor, " m"] | None = None,
) -> Chosen:
    """Sorted by row; a row's keys stay in order."""
    rows, vocabulary = logprobs.shape
    owner, order = (keys // vocabulary).sort(stable=True)
    keys = keys[order]
    counts = torch.bincount(owner, minlength=rows)
    draws = keys[:0] if draws is None else draws[order]
    return Chosen(counts, keys % vocabulary, logprobs.reshape(-1)[keys], draws)


def _counted(drawn: Int[Tensor, "rows n"], logprobs: Float[Tensor, "rows V"]) -> Chosen:
    """(id, count) of ids drawn with replacement."""
    keys, counts = torch.unique(_keys(drawn, logprobs.shape[1]), return_counts=True)
    return _of_keys(keys, logprobs, counts)


def _draw(
    logprobs: Float[Tensor, "rows V"], n: int, generator: torch.Generator | None
) -> Int[Tensor, "rows n"]:
    """n draws of each row, with replacement: inverse transform in float64, for in float32 the
    rounding of a sum over a large vocabulary is as large as a rare id."""
    cumulative = logprobs.double().exp().cumsum(1)
    shape = (len(logprobs), n)
    uniforms = torch.rand(shape, dtype=torch.float64, device=logprobs.device, generator=generator)
    drawn = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    return drawn.clamp(max=logprobs.shape[1] - 1)


def _coins(
    logprobs: Float[Tensor, "rows V"], n: int, alpha: float, generator: torch.Generator | None
) -> Int[Tensor, " kept"]:
    """Keys of the ids that are kept, each independently, with its inclusion probability.

    A random number for each id of a large vocabulary costs several log-softmaxes, and nearly all
    say no. So ids with pi <= RARE are first thinned to a fraction RARE, by drawing the gaps
    between survivors, and survivors are kept with probability pi / RARE. The product is pi.
    """
    flat = logprobs.reshape(-1)
    bound = math.log(RARE) / alpha - math.log(n)  # here pi = RARE
    likely = (flat > bound).nonzero().squeeze(1)
    rare = _thin(len(flat), RARE, flat.device, generator)
    rare = rare[flat[rare] <= bound]

    keys = torch.cat([likely, rare])
    # In float64, whose random numbers don't round a small probability up.
    pi = inclusion_log_probability(flat[keys].double(), n, alpha).exp()
    pi[len(likely) :] /= RARE
    uniforms = torch.rand(pi.shape, dtype=pi.dtype, device=pi.device, generator=generator)
    return keys[uniforms < pi]


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
