"""What an estimator costs and how wrong it is, on real models.

    responses of the sampler ─► positions ─► log p, log p_old, log q over the whole vocabulary
                                              │
             exact gradient ◄─────────────────┼──────► mean and covariance of that from a cache
                    └───────── bias, variance, cosine ─────────┘

The errors of stale caches have long tails: one position in thousands, at an id that is kept once in
a million draws, can hold most of them. So nothing is drawn here where it needn't be. How often a
cache keeps an id has a known covariance (engine/moments.py), and the error of a position's gradient
is summed from it. A batch's error is that of positions that are independent of each other, and its
covariance is measured by random vectors that have it, but no long tails. Only where what is kept of
one id changes the weight of another (M2PO) is the cache drawn, again and again.

Two gradients are compared. That of one position, with respect to its logits, says how noisy a cache
is. That of a whole batch, with respect to the model's parameters, is what training feels: there
variance averages out over the positions, and bias does not.

How small an error is small enough? The exact gradient of a batch has a variance of its own, for
its responses could have been others. An estimator whose error is a small part of that variance
can't be told from the exact loss in training, and the smallest such cache is recommended.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.batch import sequences
from engine.config import (
    M2PO,
    Cache,
    Dense,
    Estimator,
    ForwardKL,
    JensenShannon,
    MultiSample,
    Poisson,
    ReverseKL,
    Sampled,
    StudentTopK,
    TeacherHidden,
    TeacherMultiSample,
    TeacherTopK,
    TopKTail,
    chosen_by_teacher,
    is_whole,
)
from engine.estimators import Loss, loss_of, m2po_bound
from engine.head import chunked_loss, positions_per_chunk
from engine.models import Language
from engine.moments import Moments, gradient, likeliest, moments
from engine.prompts import Prompt, to_batch
from engine.rollout import RolloutWorker
from engine.schema import row_lengths
from engine.support import Support, choose

SLOTS = 128
# Groups of responses from whose gradients the variance of a batch's is estimated.
GROUPS = 8
# An error below this share of the variance that the choice of responses brings is small enough.
SMALL = 0.1
# Positions where the student is sure, and where it is not, in nats.
PEAKED, FLAT = 0.5, 2.0
# A position with more than this share of all positions' error: others would have given another sum.
DOMINANT = 0.2
# A bias below this share of the exact gradient's square is one of rounding.
ROUNDING = 1e-12
# Float64 and every id: a closed form takes so many times the memory of a chunk of the head.
CLOSED_SIZE = 8


@dataclass(frozen=True)
class Audit:
    """How one estimator does. Errors are relative to the exact gradient's squared norm, bias and
    spread to its norm."""

    estimator: str
    bytes_per_token: float
    kept_ids: float
    """Per token."""
    tail_mass: float
    """Probability of the student outside the cached ids."""
    mse: float
    """Mean squared error of a position's gradient."""
    bias: float
    """Norm of its expected error. Below its own uncertainty it is 0."""
    cosine: float
    """Between estimated and exact gradient of all positions: the expected product over the root of
    the expected squares."""
    mse_peaked: float
    """As `mse`, over positions where the student's entropy is below PEAKED."""
    mse_flat: float
    """As `mse`, over positions where the student's entropy is above FLAT."""
    batch_mse: float
    """Mean squared error of the batch's parameter gradient."""
    batch_bias: float
    batch_cosine: float
    worst: float
    """Share of `mse` that the worst position has."""
    drawn: bool
    """From draws of the cache; otherwise from its covariance."""


@dataclass(frozen=True)
class Report:
    """An audit of several estimators on the same positions."""

    rows: list[Audit]
    positions: int
    entropy: float
    """Of the student, mean over the positions, in nats."""
    drift: float
    """KL(p_old || p), mean over the positions, in nats: how stale the sampler is."""
    noise: float
    """Variance of an update's exact gradient by its choice of responses, relative to its squared
    norm."""
    recommended: str
    """The cheapest estimator whose batch error is small against `noise`; empty if none is."""

    @property
    def warnings(self) -> list[str]:
        """What to know before relying on the errors."""
        texts = {
            False: "so these depend on the responses; raise --responses and --positions",
            True: "which draws seldom show as large as it is; raise --repeats",
        }
        lines = []
        for drawn, text in texts.items():
            shares = [
                f"{row.estimator} {row.worst:.0%}"
                for row in self.rows
                if row.drawn == drawn and row.worst > DOMINANT
            ]
            if shares:
                lines.append(f"one position has much of the error, {text}: {', '.join(shares)}")
        return lines


def audit(
    student: Language,
    sampler: Language,
    teacher: Language,
    prompts: list[Prompt],
    estimators: Sequence[Estimator],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    teacher_temperature: float = 1.0,
    responses_per_update: float,
    positions: int = 1024,
    repeats: int = 16,
    seed: int = 0,
) -> Report:
    """Compares estimators with the exact gradient, at positions of the sampler's responses to
    prompts. `sampler` is the student itself, or an older version of it. One forward pass holds all
    responses. What is recommended is for updates of so many responses. `repeats` are of random
    vectors for the batch's error, and of caches that have to be drawn."""
    worker = RolloutWorker(
        sampler.sampler(temperature, SLOTS), sampler.decode, Sampled(), max_new_tokens, seed
    )
    batch, _ = worker.generate(to_batch(prompts, range(len(prompts)), [0] * len(prompts)))
    scene = _Scene.of(student, sampler, teacher, batch, (temperature, teacher_temperature))
    scene = scene.take(positions, seed)
    truths = {exact: scene.exact_gradient(exact) for exact in set(map(_exact, estimators))}
    rows = [_audited(scene, e, truths[_exact(e)], repeats, seed) for e in estimators]
    # Variances fall with the number of positions in an update, a bias doesn't.
    positions_per_response = row_lengths(batch, "response_ids").mean()
    shrink = len(scene.log_p) / (responses_per_update * positions_per_response)
    noise = shrink * scene.noise(_exact(estimators[0]))
    return Report(
        rows,
        len(scene.log_p),
        scene.entropy.mean().item(),
        (scene.log_p_old.exp() * (scene.log_p_old - scene.log_p)).sum(1).mean().item(),
        noise,
        recommended(rows, noise, shrink),
    )


def recommended(rows: Sequence[Audit], noise: float, shrink: float) -> str:
    """The cheapest estimator whose error in an update is at most SMALL of the update's noise.
    `shrink` is the number of audited positions over that of an update."""

    def error(row: Audit) -> float:
        bias = row.batch_bias**2
        return bias + shrink * max(0.0, row.batch_mse - bias)

    good = [row for row in rows if error(row) <= SMALL * noise]
    return min(good, key=lambda row: row.bytes_per_token).estimator if good else ""


def alternatives(estimator: Estimator) -> list[Estimator]:
    """The estimator in use, and the caches that could take its place."""
    match estimator:
        case ReverseKL():
            caches: list[Cache] = [
                TeacherHidden(),
                Sampled(),
                *(MultiSample(n=n) for n in (4, 16, 64)),
                *(MultiSample(n=n, distinct=True) for n in (16, 64)),
                *(StudentTopK(k=k) for k in (4, 16, 64)),
                *(TopKTail(k=k) for k in (4, 16, 64)),
                *(
                    Poisson(n=n, alpha=a, max_ratio=0)
                    for a in (1.0, 0.75)
                    for n in (16, 64, 256, 1024)
                ),
                *(Poisson(n=n, alpha=0.75) for n in (16, 64, 256, 1024)),
            ]
            others: list[Estimator] = [ReverseKL.model_validate({"cache": c}) for c in caches]
        case ForwardKL():
            caches = [
                TeacherHidden(),
                *(TeacherTopK(k=k) for k in (1, 4, 16, 64)),
                *(TeacherMultiSample(n=n) for n in (1, 4, 16, 64)),
            ]
            others = [ForwardKL.model_validate({"cache": c}) for c in caches]
        case JensenShannon(beta=beta):
            caches = [
                TeacherHidden(),
                *(TeacherTopK(k=k) for k in (4, 16, 64)),
                *(StudentTopK(k=k) for k in (4, 16, 64)),
                *(Poisson(n=n) for n in (16, 64, 256, 1024)),
            ]
            others = [JensenShannon.model_validate({"beta": beta, "cache": c}) for c in caches]
    return [estimator, *(other for other in others if other != estimator)]


def label(estimator: Estimator) -> str:
    """A short name: the cache with its settings, and what else differs from the default."""
    values = estimator.cache.model_dump(exclude={"type"})
    if values.get("n") is None:
        values.pop("alpha", None)  # of a cache that isn't thinned
    shown = [str(values.pop(key)) for key in ("n", "k", "alpha") if values.get(key) is not None]
    if (cap := values.pop("max_ratio", None)) not in (None, Poisson().max_ratio):
        shown.append(f"cap={cap:g}" if cap else "uncapped")
    shown += [k if v is True else f"{k}={v}" for k, v in values.items() if v and v != "bucket"]
    name = estimator.cache.type + (f"({', '.join(shown)})" if shown else "")
    if isinstance(estimator, ReverseKL) and estimator.stabiliser != ReverseKL().stabiliser:
        options = estimator.stabiliser.model_dump(exclude_defaults=True, exclude={"type"})
        extra = [estimator.stabiliser.type, *(f"{k}={v}" for k, v in options.items())]
        name += f" + {', '.join(extra)}"
    return name


@dataclass(frozen=True)
class _Scene:
    """n positions with the whole distributions of everybody."""

    student: Language
    temperature: float
    hidden: Float[Tensor, "n D"]
    """With the graph that leads to the parameters."""
    owners: Int[Tensor, " n"]
    """The response that each position is in."""
    log_p: Float[Tensor, "n V"]
    log_p_old: Float[Tensor, "n V"]
    log_q: Float[Tensor, "n V"]
    log_q_of_hidden: Float[Tensor, "n V"]
    """As the learner makes it of hidden states, which travel as float16."""
    hidden_bytes: int
    """Of the teacher's hidden state at a token."""

    @classmethod
    def of(
        cls,
        student: Language,
        sampler: Language,
        teacher: Language,
        batch: pa.RecordBatch,
        temperatures: tuple[float, float],
    ) -> "_Scene":
        ours, theirs = temperatures
        inputs = sequences(batch, np.arange(batch.num_rows)).to(student.device)
        hidden = student.hidden(inputs)
        with torch.no_grad():
            states = teacher.hidden(inputs)
            return cls(
                student,
                ours,
                hidden,
                inputs.sources // inputs.input_ids.shape[1],
                student.logprobs(hidden, ours),
                sampler.logprobs(sampler.hidden(inputs), ours),
                teacher.logprobs(states, theirs),
                teacher.logprobs(states.half().to(states.dtype), theirs),
                2 * states.shape[1],
            )

    @property
    def vocabulary(self) -> int:
        return self.log_p.shape[1]

    @property
    def entropy(self) -> Float[Tensor, " n"]:
        return torch.special.entr(self.log_p.exp()).sum(1)

    def take(self, positions: int, seed: int) -> "_Scene":
        """So many of the positions, at random."""
        order = np.random.default_rng(seed).permutation(len(self.log_p))[:positions]
        return self[torch.from_numpy(np.sort(order)).to(self.log_p.device)]

    def __getitem__(self, tokens: Tensor) -> "_Scene":
        columns = ("hidden", "owners", "log_p", "log_p_old", "log_q", "log_q_of_hidden")
        return replace(self, **{name: getattr(self, name)[tokens] for name in columns})

    def chunks(self, size: int = 1) -> Iterator["_Scene"]:
        """Parts whose distributions fit in memory several times, or `size` times as often."""
        positions = torch.arange(len(self.log_p), device=self.log_p.device)
        for tokens in positions.split(max(1, positions_per_chunk(self.vocabulary) // size)):
            yield self[tokens]

    def double(self) -> "_Scene":
        columns = ("log_p", "log_p_old", "log_q", "log_q_of_hidden")
        return replace(self, **{name: getattr(self, name).double() for name in columns})

    def cached(self, cache: Cache, generator: torch.Generator) -> Support:
        """What sampler and teacher would cache, drawn anew, the emitted tokens too."""
        n = len(self.log_p)
        rows = torch.arange(n, device=self.log_p.device)
        emitted = torch.multinomial(self.log_p_old.exp(), 1, generator=generator).squeeze(1)
        nothing = self.log_p.new_zeros(0)
        if is_whole(cache):
            log_q = self.log_q if isinstance(cache, Dense) else self.log_q_of_hidden
            counts = torch.full_like(rows, self.vocabulary)
            ids, draws, teacher = rows[:0], rows[:0], log_q.reshape(-1)
            sampler = proximal = nothing
        else:
            by_teacher = chosen_by_teacher(cache)
            chooser = self.log_q if by_teacher else self.log_p_old
            kept = choose(cache, chooser, emitted, generator)
            counts, ids, draws = kept.counts, kept.ids, kept.draws
            owner = torch.repeat_interleave(counts)
            teacher = self.log_q[owner, ids]
            sampler = nothing if by_teacher else self.log_p_old[owner, ids]
            proximal = self.log_p[owner, ids]
        offsets = torch.cat([rows.new_zeros(1), counts.cumsum(0)])
        logprobs = self.log_p_old[rows, emitted]
        return Support(offsets, ids, sampler, teacher, emitted, logprobs, draws, proximal)

    def everything(self, cache: Cache) -> Support:
        """As if all ids were kept, each once, those first that are kept for certain."""
        by_teacher = chosen_by_teacher(cache)
        chooser = self.log_q if by_teacher else self.log_p_old
        n = len(chooser)
        order = torch.arange(self.vocabulary, device=chooser.device).expand(n, -1)
        if isinstance(cache, Poisson) and cache.top_k:
            order = likeliest(chooser, cache.top_k).byte().argsort(1, descending=True)
        drawn = ~likeliest(chooser, cache.k if isinstance(cache, TopKTail) else 0)
        return Support(
            torch.arange(n + 1, device=order.device) * self.vocabulary,
            order.reshape(-1),
            chooser.new_zeros(0) if by_teacher else self.log_p_old.gather(1, order).reshape(-1),
            self.log_q.gather(1, order).reshape(-1),
            order[:, 0],
            self.log_p_old.gather(1, order[:, :1]).squeeze(1),
            drawn.gather(1, order).reshape(-1).long(),
            self.log_p.gather(1, order).reshape(-1),
        )

    def slopes(self, loss: Loss, cache: Cache) -> Float[Tensor, "n V"]:
        """s_a of every id: kept c_a times, the loss has the gradient sum c_a s_a (e_a - p)."""
        logprobs = self.log_p.detach().requires_grad_()
        losses, _ = loss(logprobs, self.everything(cache))
        return torch.autograd.grad(losses.sum(), logprobs)[0]

    def logit_gradient(self, loss: Loss, support: Support) -> tuple[Tensor, dict[str, Tensor]]:
        """[n, V], of the positions' losses, and their statistics."""
        logits = self.log_p.detach().requires_grad_()
        losses, statistics = loss(logits.log_softmax(-1), support)
        return torch.autograd.grad(losses.sum(), logits)[0], statistics

    def parameter_gradient(self, loss: Loss, support: Support) -> Tensor:
        """Flat, of the mean loss."""
        total, _ = chunked_loss(
            self.hidden,
            self.student.head,
            loss,
            support,
            vocabulary=self.vocabulary,
            temperature=self.temperature,
        )
        parameters = [p for p in self.student.model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(
            total / len(self.log_p), parameters, retain_graph=True, materialize_grads=True
        )
        return torch.cat([gradient.reshape(-1).float() for gradient in gradients])

    def exact_gradient(self, exact: Estimator) -> Tensor:
        """As `parameter_gradient`."""
        generator = torch.Generator(self.log_p.device)
        return self.parameter_gradient(loss_of(exact), self.cached(exact.cache, generator))

    def parameter_gradient_of(self, coefficients: Float[Tensor, "n V"]) -> Tensor:
        """Flat, of the mean over positions of sum_a coefficient_a log p(a)."""
        parts = iter(coefficients.split(positions_per_chunk(self.vocabulary)))

        def loss(logprobs: Tensor, _: Support) -> tuple[Tensor, dict[str, Tensor]]:
            return (next(parts).to(logprobs.dtype) * logprobs).sum(1), {}

        nothing = self.log_p.new_zeros(0)
        tokens = torch.zeros(len(self.log_p) + 1, dtype=torch.int64, device=self.log_p.device)
        empty = Support(tokens, tokens[:0], nothing, nothing, tokens[1:], self.log_p[:, 0])
        return self.parameter_gradient(loss, empty)

    def noise(self, exact: Estimator) -> float:
        """Variance of the exact batch gradient by the choice of responses, relative to its squared
        norm: from the spread of the contributions of GROUPS groups of responses."""
        contributions = []
        generator = torch.Generator(self.log_p.device)
        for group in range(GROUPS):
            part = self[(self.owners % GROUPS == group).nonzero().squeeze(1)]
            if len(part.log_p):
                support = part.cached(exact.cache, generator)
                share = len(part.log_p) / len(self.log_p)
                contributions.append(share * part.parameter_gradient(loss_of(exact), support))
        stacked = torch.stack(contributions)
        count = len(stacked)
        variance = count / max(1, count - 1) * (stacked - stacked.mean(0)).square().sum()
        return (variance / stacked.sum(0).square().sum()).item()


@dataclass(frozen=True)
class _Errors:
    """Of the rows of a gradient, n of them. All are expected values."""

    squared_norm: Float[Tensor, " n"]
    """Of the exact gradient."""
    squared_error: Float[Tensor, " n"]
    squared_bias: Float[Tensor, " n"]
    """Estimates, which may be negative."""
    uncertainty: Float[Tensor, " n"]
    """What was subtracted to make them unbiased; 0 where they are exact."""
    product: Float[Tensor, " n"]
    """Of estimated and exact gradient."""
    estimate: Float[Tensor, " n"]
    """Squared norm of the estimated gradient."""

    @classmethod
    def closed(cls, exact: Tensor, mean: Tensor, variance: Float[Tensor, " n"]) -> "_Errors":
        """Of an estimate with this mean [n, size] and summed variance."""
        bias = (mean - exact).square().sum(1)
        norm, product = exact.square().sum(1), (mean * exact).sum(1)
        square = mean.square().sum(1) + variance
        return cls(norm, bias + variance, bias, torch.zeros_like(bias), product, square)

    @classmethod
    def drawn(cls, exact: Tensor, estimates: Iterator[Tensor], count: int) -> "_Errors":
        """Of so many estimates [n, size]."""
        total = torch.zeros_like(exact)
        squares, errors = exact.new_zeros(len(exact)), exact.new_zeros(len(exact))
        for estimate in estimates:
            total += estimate
            squares += estimate.square().sum(1) / count
            errors += (estimate - exact).square().sum(1) / count
        mean = total / count
        spread = (squares - mean.square().sum(1)) / max(1, count - 1)
        bias, product = (mean - exact).square().sum(1), (mean * exact).sum(1)
        return cls(exact.square().sum(1), errors, bias - spread, spread, product, squares)

    @classmethod
    def together(cls, parts: "Sequence[_Errors]") -> "_Errors":
        return cls(*(torch.cat([getattr(p, f.name) for p in parts]) for f in fields(cls)))

    @property
    def cosine(self) -> float:
        product, *squares = (x.sum() for x in (self.product, self.squared_norm, self.estimate))
        return (product / (squares[0] * squares[1]).sqrt().clamp(min=1e-30)).item()


def _exact(estimator: Estimator) -> Estimator:
    """The divergence that an estimator estimates, over the whole vocabulary."""
    match estimator:
        case ReverseKL():
            return ReverseKL(cache=Dense())
        case ForwardKL():
            return ForwardKL(cache=Dense())
        case JensenShannon(beta=beta):
            return JensenShannon(beta=beta, cache=Dense())


def _loss(estimator: Estimator, scene: _Scene, support: Support) -> Loss:
    bound = math.inf
    if isinstance(estimator, ReverseKL) and isinstance(estimator.stabiliser, M2PO):
        log_p = support.gather(scene.log_p)
        behind = log_p if estimator.stabiliser.signal == "learner" else support.sampler_logprobs
        bound = m2po_bound(
            log_p - support.sampler_logprobs,
            support.teacher_logprobs - behind,
            estimator.stabiliser.budget,
        )
    return loss_of(estimator, bound)


def _audited(scene: _Scene, estimator: Estimator, truth: Tensor, repeats: int, seed: int) -> Audit:
    """`truth` is the exact gradient of the batch."""
    generator = torch.Generator(scene.log_p.device).manual_seed(seed)
    drawn = isinstance(estimator, ReverseKL) and isinstance(estimator.stabiliser, M2PO)
    cache = estimator.cache
    certain = isinstance(cache, StudentTopK | TeacherTopK) or is_whole(cache)
    if not (drawn or certain):
        positions, slopes, kept, covered = _closed_positions(scene, estimator)
        biased = _ratio(positions.squared_bias, positions.squared_norm) > ROUNDING
        batch = _closed_batch(scene, cache, truth, slopes, biased, repeats, generator)
    else:
        repeats = 1 if certain else repeats
        positions, kept, covered = _drawn_positions(scene, estimator, repeats, generator)
        batch = _drawn_batch(scene, estimator, truth, repeats, generator)
    error = positions.squared_error
    return Audit(
        estimator=label(estimator),
        bytes_per_token=(
            scene.hidden_bytes if isinstance(cache, TeacherHidden) else kept * entry_bytes(cache)
        ),
        kept_ids=kept,
        tail_mass=max(0.0, 1 - covered),
        **_position_errors(positions, scene.entropy),
        batch_mse=_ratio(batch.squared_error, batch.squared_norm),
        batch_bias=_batch_bias(batch),
        batch_cosine=batch.cosine,
        worst=(error.max() / error.sum()).item(),
        drawn=drawn,
    )


def _moments(scene: _Scene, cache: Cache) -> Moments:
    found = moments(cache, scene.log_q if chosen_by_teacher(cache) else scene.log_p_old)
    assert found is not None
    return found


def _closed_positions(
    scene: _Scene, estimator: Estimator
) -> tuple[_Errors, Float[Tensor, "n V"], float, float]:
    """Errors of each position, the slopes of every id, ids kept of a token, and the learner's
    probability of them."""
    parts, slopes, kept, covered = [], [], 0.0, 0.0
    exact = _exact(estimator)
    for chunk in scene.chunks(CLOSED_SIZE):
        part = chunk.double()
        p = part.log_p.exp()
        counts = _moments(part, estimator.cache)
        slopes.append(part.slopes(loss_of(estimator), estimator.cache))
        dense = part.cached(exact.cache, torch.Generator(p.device))
        parts.append(
            _Errors.closed(
                part.logit_gradient(loss_of(exact), dense)[0],
                gradient(slopes[-1] * counts.mean, p),
                counts.variance(slopes[-1], p),
            )
        )
        kept += counts.kept.sum().item() / len(scene.log_p)
        covered += (counts.kept * p).sum().item() / len(scene.log_p)
    return _Errors.together(parts), torch.cat(slopes), kept, covered


def _closed_batch(
    scene: _Scene,
    cache: Cache,
    truth: Tensor,
    slopes: Float[Tensor, "n V"],
    biased: bool,
    probes: int,
    generator: torch.Generator,
) -> _Errors:
    """The exact bias. The variance, which is a trace, is the mean square of random gradients."""

    def estimate(counts: Callable[[Moments], Tensor]) -> Tensor:
        parts = [counts(_moments(part, cache)) for part in scene.chunks(CLOSED_SIZE)]
        return scene.parameter_gradient_of(slopes * torch.cat(parts))

    mean = estimate(lambda counts: counts.mean) if biased else truth
    variance = truth.new_zeros(1)
    for _ in range(probes):
        variance += estimate(lambda counts: counts.probe(generator)).square().sum() / probes
    return _Errors.closed(truth[None], mean[None], variance)


def _drawn_positions(
    scene: _Scene, estimator: Estimator, repeats: int, generator: torch.Generator
) -> tuple[_Errors, float, float]:
    """As `_closed_positions`, from draws."""
    parts, sums = [], {"kept": 0.0, "covered": 0.0}
    exact = _exact(estimator)

    def estimates(part: _Scene) -> Iterator[Tensor]:
        for _ in range(repeats):
            support = part.cached(estimator.cache, generator)
            estimate, statistics = part.logit_gradient(_loss(estimator, part, support), support)
            for name in sums:
                sums[name] += statistics[name].sum().item() / repeats / len(scene.log_p)
            yield estimate

    for part in scene.chunks():
        dense = part.cached(exact.cache, generator)
        truth = part.logit_gradient(loss_of(exact), dense)[0]
        parts.append(_Errors.drawn(truth, estimates(part), repeats))
    return _Errors.together(parts), sums["kept"], sums["covered"]


def _drawn_batch(
    scene: _Scene, estimator: Estimator, truth: Tensor, repeats: int, generator: torch.Generator
) -> _Errors:
    supports = (scene.cached(estimator.cache, generator) for _ in range(repeats))
    estimates = (scene.parameter_gradient(_loss(estimator, scene, s), s)[None] for s in supports)
    return _Errors.drawn(truth[None], estimates, repeats)


def entry_bytes(cache: Cache) -> int:
    """Bytes of one cached id: the id, the scores of those who gave one, the count."""
    match cache:
        case Dense():
            return 4  # the teacher's score alone
        case TeacherTopK():
            return 8
        case TeacherMultiSample():
            return 10
        case MultiSample() | TopKTail():
            return 14
        case _:
            return 12


def _position_errors(errors: _Errors, entropy: Float[Tensor, " n"]) -> dict[str, float]:
    error, norm, bias = errors.squared_error, errors.squared_norm, errors.squared_bias
    # Three standard errors, where the bias is known from draws.
    unsure = 3 * bias.std(correction=0) * math.sqrt(len(bias)) * bool(errors.uncertainty.any())
    peaked, flat = entropy < PEAKED, entropy > FLAT
    return {
        "mse": _ratio(error, norm),
        "bias": math.sqrt(_ratio(bias, norm)) if bias.sum() > unsure else 0.0,
        "cosine": errors.cosine,
        "mse_peaked": _ratio(error[peaked], norm[peaked]),
        "mse_flat": _ratio(error[flat], norm[flat]),
    }


def _batch_bias(batch: _Errors) -> float:
    """One vector has no spread over positions to tell its uncertainty: it has to stand out well
    from what was subtracted, for errors have long tails."""
    certain = (batch.squared_bias > 2 * batch.uncertainty).item()
    return math.sqrt(_ratio(batch.squared_bias, batch.squared_norm)) if certain else 0.0


def _ratio(part: Tensor, whole: Tensor) -> float:
    """Of sums; NaN where there is nothing."""
    return (part.sum() / whole.sum()).item() if len(whole) else math.nan
