"""The learner against plain transformers: one sequence at a time, all logits, autograd."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
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
    TeacherHidden,
    TeacherMultiSample,
    TeacherTopK,
    TopKTail,
    Unclipped,
)
from engine.learner import LearnerWorker
from engine.metrics import by_age, checked
from engine.models import Language
from engine.rollout import RolloutWorker
from engine.schema import SCORED, describe, validate
from engine.scoring import TeacherWorker
from engine.weights import load_into
from tests.engine.tiny import (
    language,
    logprobs_of,
    next_logprobs,
    prompt_batch,
    random_ids,
    rollout_batch,
    run_config,
    with_column,
)

PROMPTS = [random_ids(length, length, 50) for length in (3, 30, 1, 12, 7)]
RESPONSES = [random_ids(length, 90 + length, 50) for length in (9, 1, 2, 24, 5)]
ROWS = [[0, 1, 2, 3, 4]]
TOKENS = sum(map(len, RESPONSES))

SAMPLED, DENSE = ReverseKL(cache=Sampled()), ReverseKL(cache=Dense())
POISSON = ReverseKL(cache=Poisson(n=16, max_ratio=0))
TOP_K, FORWARD_DENSE = ForwardKL(cache=TeacherTopK(k=5)), ForwardKL(cache=Dense())
MULTI, TAIL = ReverseKL(cache=MultiSample(n=8)), ReverseKL(cache=TopKTail(k=4))
STUDENT_TOP_K = ReverseKL(cache=StudentTopK(k=5))
HIDDEN, FORWARD_HIDDEN = ReverseKL(cache=TeacherHidden()), ForwardKL(cache=TeacherHidden())
TEACHER_DRAWS = ForwardKL(cache=TeacherMultiSample(n=8))
# Each way from the Arrow columns to a loss.
ESTIMATORS = [
    SAMPLED,
    MULTI,
    POISSON,
    TAIL,
    DENSE,
    STUDENT_TOP_K,
    TOP_K,
    TEACHER_DRAWS,
    FORWARD_DENSE,
    HIDDEN,
    FORWARD_HIDDEN,
]
# What is the same to the learner, and another formula.
OTHERS = [
    ReverseKL(cache=MultiSample(n=8, distinct=True)),
    ReverseKL(cache=Poisson(n=16, top_k=3)),
    ReverseKL(cache=TopKTail(k=4, n=8)),
    ReverseKL(cache=StudentTopK(k=5, rest="renormalise")),
    JensenShannon(cache=Poisson(n=16)),
    JensenShannon(cache=StudentTopK(k=5)),
    JensenShannon(cache=TeacherTopK(k=5)),
    JensenShannon(cache=Dense()),
    ReverseKL(cache=Sampled(), stabiliser=Unclipped(signal="rollout", ratio=False)),
    ReverseKL(cache=MultiSample(n=8), stabiliser=Clipped()),
]
DECOUPLED, M2PO_ = (
    ReverseKL(cache=MultiSample(n=8), stabiliser=stabiliser)
    for stabiliser in (Decoupled(eps=0.05, cap=1.3), M2PO(budget=0.003))
)
# They look at a whole step before they train on it.
LOOKING_AHEAD = [DECOUPLED, M2PO_]


def name_of(estimator) -> str:
    name = f"{estimator.type}-{estimator.cache.type}"
    stabiliser = getattr(estimator, "stabiliser", Unclipped())
    return name if stabiliser == Unclipped() else f"{name}-{stabiliser.type}"


def each(estimators):
    return pytest.mark.parametrize("estimator", estimators, ids=name_of)


each_estimator = each(ESTIMATORS)


@pytest.fixture(scope="module")
def student(tiny_student) -> Language:
    return language(tiny_student)


@pytest.fixture(scope="module")
def teacher(tiny_teacher) -> Language:
    return language(tiny_teacher)


@pytest.fixture(scope="module")
def stale(tiny_student) -> Language:
    """The student some updates ago: near it, but not the same."""
    model = language(tiny_student)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.05 * parameter.std() * noise)
    return model


@pytest.fixture
def make(tiny_student, tiny_teacher):
    """Learners of the tiny student, by estimator and settings."""

    def build(estimator=DENSE, dtype=torch.float32, folder=None, **sections) -> LearnerWorker:
        config = run_config(
            tiny_student, tiny_teacher, estimator=estimator.model_dump(), **sections
        )
        build.model = language(folder or tiny_student)
        learner = LearnerWorker(build.model, dtype, config)
        learner.imitate(tiny_teacher, language(tiny_teacher).head_weights())
        return learner

    return build


def scored(
    sampler: Language,
    teacher: Language,
    estimator=DENSE,
    temperature: float = 1.0,
    runs=None,
    prompts=PROMPTS,
    responses=RESPONSES,
) -> pa.RecordBatch:
    cache = estimator.cache
    batch = rollout_batch(sampler, prompts, responses, cache, temperature, runs)
    return TeacherWorker(teacher, 1.0, 4096).score([batch], cache)[0]


def stepped(learner: LearnerWorker, batches, rows):
    """One step; the weights that it published, and its report."""
    learner.load(batches, rows, learner.version)
    report = learner.step()
    return learner.published()[0], report


def gradient(model: Language) -> Tensor:
    parts = [
        torch.zeros(p.numel()) if p.grad is None else p.grad.flatten()
        for p in model.model.parameters()
    ]
    return torch.cat(parts).clone()


def step_gradient(make, batch, rows=ROWS, **settings) -> Tensor:
    """The gradient that the optimizer saw in a learner's first step."""
    stepped(make(**settings), [batch], rows)
    return gradient(make.model)


def flat(model: Language) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.model.parameters()]).clone()


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def naive_gradient(
    folder: Path,
    batch: pa.RecordBatch,
    teacher: Language,
    estimator,
    temperature: float = 1.0,
    counted=None,
) -> Tensor:
    """Written from the formulas: no chunks, no padding, no masks, one row at a time."""
    model = language(folder)
    losses = []
    for index, row in enumerate(batch.to_pylist()):
        prompt, response = row["prompt_ids"], row["response_ids"]
        all_logprobs = next_logprobs(
            model.model, [*prompt, *response], model.vocabulary, temperature
        )
        for t in range(len(response)):
            if counted is not None and not counted[index][t]:
                continue
            log_p = all_logprobs[len(prompt) + t - 1]
            log_q = torch.tensor(row["teacher_logprobs"][t])
            if states := row["teacher_hidden"][t]:
                hidden = torch.tensor(states, dtype=torch.float32)
                log_q = teacher.logprobs(hidden[None], 1.0)[0].detach()
            losses.append(_naive_loss(estimator, row, t, log_p, log_q))
    loss = torch.stack(losses).mean()
    grads = torch.autograd.grad(loss, list(model.model.parameters()))
    return torch.cat([g.flatten() for g in grads])


def _naive_loss(estimator, row, t: int, log_p: Tensor, log_q: Tensor) -> Tensor:
    match estimator:
        case ReverseKL(cache=Dense() | TeacherHidden()):
            return (log_p.exp() * (log_p - log_q)).sum()
        case ForwardKL(cache=Dense() | TeacherHidden()):
            return (log_q.exp() * (log_q - log_p)).sum()
        case ForwardKL(cache=TeacherTopK()):
            ids = row["teacher_ids"][t]
            rest_q, rest_p = 1 - log_q.exp().sum(), 1 - log_p[ids].exp().sum()
            inside = (log_q.exp() * (log_q - log_p[ids])).sum()
            return inside + rest_q * (rest_q.log() - rest_p.log())
        case ForwardKL(cache=TeacherMultiSample(n=n)):
            ids, draws = row["teacher_ids"][t], torch.tensor(row["teacher_draws"][t])
            return (draws / n * (log_q - log_p[ids])).sum()
        case ReverseKL(cache=StudentTopK()):
            ids = row["cache_ids"][t]
            rest_p, rest_q = 1 - log_p[ids].exp().sum(), 1 - log_q.exp().sum()
            inside = (log_p[ids].exp() * (log_p[ids] - log_q)).sum()
            return inside + rest_p * (rest_p.log() - rest_q.log())
        case ReverseKL(cache=cache):
            ids = row["cache_ids"][t]
            p_old = torch.tensor(row["cache_logprobs"][t]).exp()
            draws = torch.tensor(row["cache_draws"][t])
            match cache:
                case Sampled():
                    weight = 1 / p_old
                case MultiSample(n=n):
                    weight = draws / (n * p_old)
                case Poisson(n=n, alpha=alpha):
                    weight = 1 / (n * p_old).pow(alpha).clamp(max=1)
                case TopKTail():
                    weight = torch.where(draws == 1, 1 / p_old, 1)
            p = log_p[ids]
            return -(p.exp() * weight * (log_q - p.detach())).sum()


# The gradient


@pytest.mark.parametrize(("stale", "temperature"), [(False, 1.0), (True, 0.7)])
@each_estimator
def test_the_gradient_is_that_of_the_formula(
    make, student, teacher, tiny_student, estimator, stale, temperature
):
    sampler = teacher if stale else student  # another model's samples: ratios far from 1
    batch = scored(sampler, teacher, estimator, temperature)
    settings = {"estimator": estimator, "rollout": {"temperature": temperature}}
    ours = step_gradient(make, batch, **settings)
    expected = naive_gradient(tiny_student, batch, teacher, estimator, temperature)
    assert relative(ours, expected) < 1e-5


@each_estimator
def test_the_split_into_micro_batches_does_not_change_it(make, student, teacher, estimator):
    batch = scored(student, teacher, estimator)
    whole = step_gradient(make, batch, estimator=estimator, training={"micro_tokens": 100_000})
    for budget in (1, 50, 80):
        parts = step_gradient(make, batch, estimator=estimator, training={"micro_tokens": budget})
        assert relative(parts, whole) < 1e-6


@each(LOOKING_AHEAD)
def test_a_stabiliser_looks_at_a_whole_step_whatever_its_split_into_micro_batches(
    make, stale, teacher, estimator
):
    batch = scored(stale, teacher, estimator)
    ends, gradients = [], []
    for budget in (1, 50, 100_000):
        learner = make(
            estimator=estimator,
            training={"micro_tokens": budget, "mini_batches": 2, "passes": 2},
            optimizer={"type": "muon", "lr": 1e-9, "matrix_lr": 0.01, "warmup_steps": 0},
        )
        start = flat(make.model)
        _, report = stepped(learner, [batch], ROWS)
        assert 0.02 < report.metrics["policy/clipped_share"] < 0.9, "it has work to do"
        ends.append(flat(make.model) - start)
        gradients.append(gradient(make.model))
    for end, grad in zip(ends[:2], gradients[:2], strict=True):
        assert relative(end, ends[2]) < 1e-3
        assert relative(grad, gradients[2]) < 1e-3


def test_the_split_into_micro_batches_does_not_change_the_weights(make, student, teacher):
    batch = scored(student, teacher)
    # AdamW's first step is the gradient's sign, so that rounding shows where it is about 0; Muon
    # moves by whole matrices.
    optimizer = {"type": "muon", "lr": 1e-9, "matrix_lr": 0.01, "warmup_steps": 0}
    ends = []
    for budget in (1, 50, 100_000):
        learner = make(optimizer=optimizer, training={"micro_tokens": budget})
        start = flat(make.model)
        stepped(learner, [batch], ROWS)
        ends.append(flat(make.model) - start)
    assert ends[0].norm() > 0
    assert relative(ends[0], ends[2]) < 1e-4
    assert relative(ends[1], ends[2]) < 1e-4


def test_rows_add_up_whatever_their_company_and_order(make, student, teacher):
    """Padding, other rows and their order change nothing: the parts' sum is the whole."""
    batch = scored(student, teacher)
    together = step_gradient(make, batch) * TOKENS
    alone = [step_gradient(make, batch, [[i]]) * len(RESPONSES[i]) for i in range(5)]
    assert relative(sum(alone), together) < 1e-6
    turned = step_gradient(make, batch, [[4, 2, 0, 3, 1]]) * TOKENS
    assert relative(turned, together) < 1e-6


def test_rows_of_several_batches_are_one_step(make, student, teacher):
    batch = scored(student, teacher)
    learner = make()
    stepped(learner, [batch.slice(3), batch.slice(0, 3)], [[1], [2, 0]])
    assert relative(gradient(make.model), step_gradient(make, batch, [[4, 2, 0]])) < 1e-6


def test_only_positions_that_predict_a_response_token_get_a_gradient(make, teacher, student):
    """The first and the last token, an end-of-sequence, too; prompt and padding exactly none."""
    responses = [[*ids[:-1], student.stop_ids[0]] for ids in RESPONSES]
    batch = scored(student, teacher, responses=responses)
    learner = make(training={"micro_tokens": 100_000})
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(module, arguments, keywords, output) -> None:
        if output.last_hidden_state.requires_grad:  # not the canary's
            output.last_hidden_state.retain_grad()
            seen.append((keywords["input_ids"], output.last_hidden_state))

    make.model.model.base_model.register_forward_hook(keep, with_kwargs=True)
    stepped(learner, [batch], ROWS)
    ((inputs, states),) = seen
    assert len(inputs) == 5
    pairs = dict(zip(map(tuple, PROMPTS), responses, strict=True))
    for ids, grads in zip(inputs.tolist(), states.grad, strict=True):
        prompt = next(p for p in pairs if tuple(ids[: len(p) + 1]) == (*p, pairs[p][0]))
        predicting = set(range(len(prompt) - 1, len(prompt) - 1 + len(pairs[prompt])))
        for position, grad in enumerate(grads):
            assert bool(grad.any()) == (position in predicting)


def naive_decoupled(
    at: Language, proximal: Language, batch: pa.RecordBatch, stabiliser: Decoupled
) -> Tensor:
    """Gradient at a model, of which the step began as another."""
    losses = []
    for row in batch.to_pylist():
        ids, last = [*row["prompt_ids"], *row["response_ids"]], len(row["prompt_ids"]) - 1
        now = next_logprobs(at.model, ids, at.vocabulary)
        with torch.no_grad():
            then = next_logprobs(proximal.model, ids, at.vocabulary)
        for t, token in enumerate(row["response_ids"]):
            log_p, log_start = now[last + t, token], then[last + t, token]
            held = (log_start - row["sampler_logprobs"][t]).exp()
            signal = row["teacher_logprobs"][t][0] - log_p.detach()
            ratio = (log_p - log_start).exp()
            clipped = ratio.clamp(1 - stabiliser.eps, 1 + stabiliser.eps)
            objective = torch.minimum(ratio * signal, clipped * signal)
            losses.append(-held * objective if held <= stabiliser.cap else 0 * log_p)
    grads = torch.autograd.grad(torch.stack(losses).mean(), list(at.model.parameters()))
    return torch.cat([g.flatten() for g in grads])


def test_the_decoupled_ratio_is_taken_to_the_policy_at_the_steps_start(
    make, student, stale, teacher
):
    stabiliser = Decoupled(eps=0.05, cap=1.3)
    estimator = ReverseKL(cache=Sampled(), stabiliser=stabiliser)
    batch = scored(stale, teacher, estimator)
    settings = {"optimizer": {"lr": 1e-3}, "training": {"micro_tokens": 50}}
    stepped(make(estimator, **settings), [batch], ROWS)
    between = make.model  # after the first of the two updates
    settings["training"] |= {"passes": 2}
    stepped(make(estimator, **settings), [batch], ROWS)
    second = gradient(make.model)
    assert relative(second, naive_decoupled(between, student, batch, stabiliser)) < 1e-4
    others = {"the last update": between, "the sampler": stale}
    for other in others.values():
        assert relative(second, naive_decoupled(between, other, batch, stabiliser)) > 0.05


# Ratio and divergence


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_ratio_of_fresh_tokens_is_1(make, student, teacher, temperature):
    sampler = student.sampler(temperature, slots=3)
    worker = RolloutWorker(sampler, student.decode, Poisson(), 20, seed=0)
    rollouts, _ = worker.generate(prompt_batch(PROMPTS))
    batch, _ = TeacherWorker(teacher, 1.0, 64).score([rollouts], POISSON.cache)
    learner = make(POISSON, rollout={"temperature": temperature})
    _, report = stepped(learner, [batch], ROWS)
    assert report.metrics["policy/ratio_deviation"] < 1e-3
    assert report.metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-3)
    assert report.metrics["policy/effective_sample"] == pytest.approx(1, abs=1e-3)
    # A learner that believes in another temperature is found out.
    _, report = stepped(make(POISSON, rollout={"temperature": 0.85}), [batch], ROWS)
    assert report.metrics["policy/ratio_deviation"] > 0.01


def test_the_ratio_deviation_leaves_out_responses_that_a_swap_went_through(make, student, teacher):
    runs = [[(0, len(ids))] for ids in RESPONSES]
    runs[0] = [(-1, 4), (0, 5)]
    batch = scored(student, teacher, runs=runs)
    logprobs = batch["sampler_logprobs"].to_pylist()
    logprobs[0] = [x - 1 for x in logprobs[0]]  # what old keys and values may do
    batch = with_column(batch, "sampler_logprobs", logprobs)
    assert stepped(make(), [batch], ROWS)[1].metrics["policy/ratio_deviation"] < 1e-3
    logprobs[3] = [x - 1 for x in logprobs[3]]
    batch = with_column(batch, "sampler_logprobs", logprobs)
    assert stepped(make(), [batch], ROWS)[1].metrics["policy/ratio_deviation"] > 1


def test_dropout_in_a_models_configuration_does_not_reach_the_learner(
    make, student, teacher, tiny_student, tmp_path
):
    folder = shutil.copytree(tiny_student, tmp_path / "dropout")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    batch = scored(student, teacher)
    _, report = stepped(make(folder=folder), [batch], ROWS)
    assert report.metrics["policy/ratio_deviation"] < 1e-3


@each([e for e in [*ESTIMATORS, *OTHERS, *LOOKING_AHEAD] if e != TEACHER_DRAWS])  # noise: it draws
def test_a_student_that_is_its_teacher_gets_no_gradient(make, student, estimator):
    batch = scored(student, student, estimator)
    learner = make(estimator)
    learner.imitate(student.folder, student.head_weights())
    _, report = stepped(learner, [batch], ROWS)
    # Hidden states are rounded to float16.
    assert gradient(make.model).norm() < (2e-3 if estimator in (HIDDEN, FORWARD_HIDDEN) else 1e-5)
    assert abs(report.metrics["train/loss"]) < 1e-6


def test_the_dense_loss_is_the_exact_divergence_per_token(make, student, teacher):
    batch = scored(student, teacher)
    learner = make()
    divergence = learner.divergence([batch], ROWS)
    naive = []
    with torch.no_grad():
        for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
            log_p, log_q = (
                next_logprobs(model.model, [*prompt, *response], model.vocabulary)
                for model in (student, teacher)
            )
            kl = (log_p.exp() * (log_p - log_q)).sum(-1)
            naive.append(kl[len(prompt) - 1 : -1].double().sum().item())
    assert divergence.tolist() == pytest.approx(naive, abs=1e-4)
    _, report = stepped(learner, [batch], ROWS)
    assert report.metrics["train/loss"] == pytest.approx(sum(naive) / TOKENS, abs=1e-5)


def test_the_divergence_counts_tokens_of_any_age_and_changes_nothing(make, student, teacher):
    batch = scored(student, teacher)
    learner = make(SAMPLED, staleness={"max": 0})
    learner.version = 7
    before = flat(make.model)
    divergence = learner.divergence([batch], [[3, 1]])
    fresh = make().divergence([batch], ROWS)
    assert divergence.tolist() == pytest.approx(fresh[[3, 1]].tolist(), abs=1e-5)
    assert torch.equal(flat(make.model), before)
    assert learner.version == 7


# Ages and masks


def aged(student, teacher, estimator=DENSE) -> tuple[pa.RecordBatch, list[list[bool]]]:
    """A batch for a learner at version 5 with a bound of 1, and which tokens count there."""
    runs = [
        [(2, 3), (5, 6)],  # the start is too old
        [(5, 1)],
        [(3, 2)],  # all of it is too old
        [(1, 10), (3, 4), (4, 5), (5, 5)],
        [(4, 5)],
    ]
    counted = [[v >= 4 for v, n in row for _ in range(n)] for row in runs]
    return scored(student, teacher, estimator, runs=runs), counted


@each_estimator
def test_tokens_beyond_the_bound_contribute_nothing(
    make, student, teacher, tiny_student, estimator
):
    batch, counted = aged(student, teacher, estimator)
    learner = make(estimator)
    learner.version = 5
    _, report = stepped(learner, [batch], ROWS)
    expected = naive_gradient(tiny_student, batch, teacher, estimator, counted=counted)
    assert relative(gradient(make.model), expected) < 1e-5
    assert report.trained_tokens == report.metrics["train/tokens"] == 6 + 1 + 10 + 5
    assert report.metrics["staleness/masked_tokens"] == 3 + 2 + 14
    assert report.age_tokens == {0: 6 + 1 + 5, 1: 5 + 5}
    assert report.metrics["staleness/max_age"] == 1


def test_how_far_tokens_are_left_behind_is_told_for_each_age(make, student, stale, teacher):
    runs = [[(2, 3), (5, 6)], [(5, 1)], [(1, 2)], [(1, 10), (3, 4), (4, 5), (5, 5)], [(4, 5)]]
    cap = 0.05
    estimator = ReverseKL(cache=Poisson(n=16, max_ratio=cap))
    batch = scored(stale, teacher, estimator, runs=runs)
    tokens: dict[int, list[tuple]] = {}
    for row in batch.to_pylist():
        true = logprobs_of(
            student.model, row["prompt_ids"], row["response_ids"], student.vocabulary, 1.0
        ).numpy()
        ages = [5 - run["version"] for run in row["version_runs"] for _ in range(run["length"])]
        for t, token in enumerate(row["response_ids"]):
            p = np.exp(true[t, row["cache_ids"][t]])
            pi = np.minimum(1, (16 * np.exp(row["cache_logprobs"][t])) ** 0.75)
            ratio = np.exp(true[t, token] - row["sampler_logprobs"][t])
            tokens.setdefault(ages[t], []).append((ratio, sum(p / pi > cap), len(p), 1 - sum(p)))
    del tokens[4]  # beyond the bound
    assert sorted(tokens) == [0, 1, 2, 3]

    learner = make(estimator, staleness={"max": 3}, training={"passes": 2})
    learner.version = 5
    _, report = stepped(learner, [batch], ROWS)
    expected = {}
    groups = {None: [x for group in tokens.values() for x in group]} | tokens
    for age, group in groups.items():
        r, clipped, kept, tail = np.array(group).T
        values = {
            "policy/effective_sample": r.sum() ** 2 / (len(r) * (r**2).sum()),
            "policy/ratio_q05": np.quantile(r, 0.05),
            "policy/ratio_q95": np.quantile(r, 0.95),
            "policy/clipped_share": clipped.sum() / kept.sum(),
            "cache/tail_mass": tail.mean(),
        }
        expected |= {n if age is None else by_age(n, age): v for n, v in values.items()}
    names = {name for name in checked(report.metrics) if "/age_" in name} | set(values)
    assert {n: report.metrics[n] for n in names} == pytest.approx(expected, abs=1e-4)
    assert report.metrics["policy/clipped_share"] > 0
    assert len({round(v, 3) for n, v in expected.items() if "q95" in n}) == 5, "each its own"


def test_nothing_that_a_masked_token_carries_reaches_the_loss(make, student, teacher):
    batch, counted = aged(student, teacher)
    rows = batch["teacher_logprobs"].to_pylist()
    spoilt = [
        [scores if keep else [math.nan] * len(scores) for scores, keep in zip(*pair, strict=True)]
        for pair in zip(rows, counted, strict=True)
    ]
    gradients = []
    for teacher_logprobs in (rows, spoilt):
        learner = make()
        learner.version = 5
        stepped(learner, [with_column(batch, "teacher_logprobs", teacher_logprobs)], ROWS)
        gradients.append(gradient(make.model))
    assert torch.equal(*gradients)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@each([*ESTIMATORS, *LOOKING_AHEAD])
def test_a_batch_that_is_masked_altogether_moves_nothing(
    make, student, teacher, estimator, optimizer
):
    batch = scored(student, teacher, estimator)
    learner = make(estimator, optimizer={"type": optimizer, "weight_decay": 0.1})
    stepped(learner, [batch], ROWS)  # momentum that could go on
    learner.version = 9
    before = flat(make.model)
    weights, report = stepped(learner, [batch], ROWS)
    assert torch.equal(flat(make.model), before)
    assert weights.version == report.version == 10
    assert report.trained_tokens == 0
    assert report.metrics["staleness/masked_tokens"] == TOKENS
    assert all(math.isfinite(value) for value in report.metrics.values())


# Updates


@each([*ESTIMATORS, *OTHERS, *LOOKING_AHEAD])
def test_a_step_trains_and_makes_the_next_version(make, student, teacher, estimator):
    batch = scored(student, teacher, estimator)
    learner = make(estimator)
    before = flat(make.model)
    for version in (1, 2):
        weights, report = stepped(learner, [batch], ROWS)
        assert weights.version == report.version == learner.version == version
        assert all(math.isfinite(value) for value in report.metrics.values())
        assert report.metrics["train/skipped_updates"] == 0
    assert not torch.equal(flat(make.model), before)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_an_update_with_a_non_finite_gradient_is_skipped_and_counted(
    make, student, teacher, poison
):
    batch = scored(student, teacher)
    rows = batch["teacher_logprobs"].to_pylist()
    rows[3][7][11] = poison
    bad = with_column(batch, "teacher_logprobs", rows)
    learner = make()
    before = flat(make.model)
    _, report = stepped(learner, [bad], ROWS)
    assert report.metrics["train/skipped_updates"] == 1
    assert torch.equal(flat(make.model), before)
    # The next one trains as if nothing had been.
    _, report = stepped(learner, [batch], ROWS)
    assert report.metrics["train/skipped_updates"] == 0
    assert math.isfinite(report.metrics["train/loss"])
    moved = flat(make.model)
    other = make()
    stepped(other, [batch], ROWS)
    assert (moved - flat(make.model)).abs().max() < 1e-3  # one step of 1e-3, at another rate
    assert not torch.equal(moved, before)


def test_one_bad_mini_batch_does_not_stop_the_others(make, student, teacher):
    batch = scored(student, teacher)
    rows = batch["teacher_logprobs"].to_pylist()
    rows[3][7][11] = math.nan
    bad = with_column(batch, "teacher_logprobs", rows)
    learner = make(training={"batch": 5, "mini_batches": 5})
    before = flat(make.model)
    _, report = stepped(learner, [bad], ROWS)
    assert report.metrics["train/skipped_updates"] == 1
    assert math.isfinite(report.metrics["train/grad_norm"])
    assert not torch.equal(flat(make.model), before)
    assert bool(flat(make.model).isfinite().all())


def test_passes_and_mini_batches_are_updates_and_each_pass_sees_each_row_once(
    make, student, teacher, tmp_path
):
    batch = scored(student, teacher)
    learner = make(training={"batch": 5, "mini_batches": 2, "passes": 3, "micro_tokens": 1})
    seen: list[int] = []  # micro_tokens = 1: one row in a forward pass

    def keep(module, arguments, keywords) -> None:
        seen.append(len(keywords["input_ids"][0]))

    make.model.model.base_model.register_forward_pre_hook(keep, with_kwargs=True)
    _, report = stepped(learner, [batch], ROWS)
    lengths = [len(p) + len(r) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    assert [sorted(seen[i : i + 5]) for i in (0, 5, 10)] == [sorted(lengths)] * 3
    assert seen[:5] != seen[5:10] or seen[:5] != seen[10:]  # shuffled anew in each pass
    learner.save(tmp_path, [], [])
    steps = {
        value.item()
        for name, value in load_file(tmp_path / "optimizer.safetensors").items()
        if name.endswith(":step")
    }
    assert steps == {6}
    assert report.version == 1
    assert report.trained_tokens == TOKENS


def test_a_large_gradient_is_clipped(make, student, teacher):
    batch = scored(student, teacher)
    _, report = stepped(make(optimizer={"clip": 0.01}), [batch], ROWS)
    assert report.metrics["train/grad_norm"] > 0.1  # before clipping
    assert gradient(make.model).norm().item() == pytest.approx(0.01, rel=1e-3)


def test_the_divergence_falls_as_a_student_learns_from_its_own_responses(
    make, teacher, tiny_student
):
    actor = language(tiny_student)
    worker = RolloutWorker(actor.sampler(1.0, slots=8), actor.decode, Dense(), 12, seed=0)
    scorer = TeacherWorker(teacher, 1.0, 4096)
    settings = {"training": {"steps": 30, "batch": 8}, "optimizer": {"lr": 1e-2}}
    learner = make(DENSE, **settings)
    prompts = [random_ids(6, seed, 50) for seed in range(8)]
    rows = [list(range(8))]
    weights, _ = learner.published()
    kls = []
    for step in range(30):
        rollouts, _ = worker.generate(prompt_batch(prompts, first_ticket=8 * step), weights)
        batch, _ = scorer.score([rollouts], Dense())
        weights, report = stepped(learner, [batch], rows)
        kls.append(report.metrics["train/loss"])
    assert np.mean(kls[-3:]) < 0.5 * kls[0]
    assert worker.version == 29


# Weights and checkpoints


def test_published_weights_are_the_learners_own(make, student, teacher, tiny_teacher):
    batch = scored(student, teacher)
    weights, _ = stepped(make(), [batch], ROWS)
    receiver = language(tiny_teacher)
    load_into(receiver.model, weights)
    assert torch.equal(flat(receiver), flat(make.model))


def test_a_bfloat16_learner_keeps_float32_masters_and_publishes_bfloat16(make, student, teacher):
    batch = scored(student, teacher)
    learner = make(dtype=torch.bfloat16)
    weights, report = stepped(learner, [batch], ROWS)
    assert {entry.dtype for entry in weights.entries} == {torch.bfloat16}
    assert {parameter.dtype for parameter in make.model.model.parameters()} == {torch.float32}
    assert report.metrics["policy/ratio_deviation"] < 0.2  # 8 bits of mantissa
    exact = step_gradient(make, batch)
    learner = make(dtype=torch.bfloat16)
    stepped(learner, [batch], ROWS)
    assert relative(gradient(make.model), exact) < 0.05


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_restored_learner_goes_on_bit_for_bit(make, student, teacher, tmp_path, optimizer):
    batch = scored(student, teacher)
    settings = {
        "optimizer": {"type": optimizer, "weight_decay": 0.01, "warmup_steps": 3},
        "training": {"mini_batches": 2},
        "staleness": {"max": 9},  # of one batch, trained on again and again
    }
    learner = make(**settings)
    stepped(learner, [batch], ROWS)
    stepped(learner, [batch], ROWS)
    learner.save(tmp_path, [batch], [[4, 1]])
    stepped(learner, [batch], ROWS)
    stepped(learner, [batch], ROWS)
    expected = flat(make.model)

    other = make(**settings)
    weights, buffer, metas = other.restore(tmp_path, 2)
    assert weights.version == other.version == 2
    assert validate(buffer, SCORED).equals(batch.take(pa.array([4, 1])))
    assert metas == describe(buffer)
    assert not torch.equal(flat(make.model), expected)
    stepped(other, [batch], ROWS)
    stepped(other, [batch], ROWS)
    assert torch.equal(flat(make.model), expected)


def test_restored_rows_can_be_trained_on(make, student, teacher, tmp_path):
    batch = scored(student, teacher)
    learner = make()
    learner.save(tmp_path, [batch], ROWS)
    _, buffer, _ = learner.restore(tmp_path, 0)
    stepped(learner, [buffer], ROWS)
    assert torch.equal(gradient(make.model), step_gradient(make, batch))


def test_a_checkpoint_without_waiting_rows_restores_an_empty_buffer(make, tmp_path):
    learner = make()
    learner.save(tmp_path, [], [])
    _, buffer, metas = learner.restore(tmp_path, 0)
    assert validate(buffer, SCORED).num_rows == 0
    assert metas == []


def test_a_checkpoints_model_is_an_ordinary_folder(make, student, teacher, tmp_path):
    batch = scored(student, teacher)
    stepped(make(), [batch], ROWS)
    trained = make.model
    trained.save(tmp_path)
    assert torch.equal(flat(language(tmp_path)), flat(trained))
