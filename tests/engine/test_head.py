"""The chunked head against the same loss over all logits at once."""

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from engine.config import Dense, ForwardKL, JensenShannon, ReverseKL, TeacherHidden, TeacherTopK
from engine.estimators import loss_of
from engine.head import LOGITS_PER_CHUNK, Head, TeacherHead, chunked_loss, positions_per_chunk
from engine.support import Support
from tests.engine.test_estimators import (
    DENSE,
    ESTIMATORS,
    cache_for,
    each_estimator,
    each_zero_estimator,
    poisson,
)

N, D, V = 11, 5, 13


class Watched:
    """What a head does to its logits, softcapped as Gemma's on request; remembers what it saw."""

    def __init__(self, softcap: float | None = None):
        self.softcap = softcap
        self.calls: list[tuple[int, bool]] = []

    def __call__(self, logits: Tensor) -> Tensor:
        self.calls.append((len(logits), torch.is_grad_enabled()))
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def linear(
    bias: bool = True, rows: int = V, dtype: torch.dtype = torch.float32, finish=None
) -> Head:
    torch.manual_seed(1)
    projection = nn.Linear(D, rows, bias=bias)
    nn.init.normal_(projection.weight)
    return Head(projection.to(dtype), finish or Watched())


def states(n: int = N, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(n, D, generator=generator).to(dtype).requires_grad_()


def cache(estimator, n: int = N, vocabulary: int = V):
    generator = torch.Generator().manual_seed(3)
    p_old, q = torch.randn(2, n, vocabulary, generator=generator).log_softmax(-1)
    return cache_for(estimator, p_old, q)


def naive_loss(hidden, head, loss, support, *, vocabulary, temperature):
    logits = head(hidden)[..., :vocabulary].float() / temperature
    losses, statistics = loss(logits.log_softmax(-1), support)
    return losses.sum(), statistics


def gradients(value: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, inputs)


def assert_same(actual, expected, tolerance: float = 1e-6) -> None:
    """Equal up to a tolerance relative to the largest element."""
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        scale = max(1.0, other.abs().max().item())
        torch.testing.assert_close(one, other, atol=tolerance * scale, rtol=0)


SETTINGS = {"vocabulary": V, "temperature": 1.0}


@pytest.mark.parametrize("chunk", [1, 3, N, 2 * N, None])
@each_estimator
def test_value_gradients_and_statistics_are_those_of_all_logits_at_once(name, chunk):
    loss, support = loss_of(ESTIMATORS[name]), cache(ESTIMATORS[name])
    hidden, head = states(), linear()
    inputs = (hidden, head.projection.weight, head.projection.bias)
    total, statistics = chunked_loss(hidden, head, loss, support, **SETTINGS, chunk=chunk)
    expected, expected_statistics = naive_loss(hidden, head, loss, support, **SETTINGS)
    assert_same([total], [expected])
    assert_same(gradients(total, *inputs), gradients(expected, *inputs))
    assert statistics.keys() == expected_statistics.keys()
    assert_same(statistics.values(), expected_statistics.values())
    assert not any(value.requires_grad for value in statistics.values())


@each_estimator
def test_softcapped_logits_at_a_temperature_without_padded_ids(name):
    loss, support = loss_of(ESTIMATORS[name]), cache(ESTIMATORS[name])
    hidden, head = states(), linear(rows=V + 3, finish=Watched(softcap=2.0))
    inputs = (hidden, *head.parameters())
    given = {"vocabulary": V, "temperature": 0.7}
    total, _ = chunked_loss(hidden, head, loss, support, **given, chunk=4)
    expected, _ = naive_loss(hidden, head, loss, support, **given)
    assert_same([total], [expected])
    assert_same(gradients(total, *inputs), gradients(expected, *inputs))


def test_embedding_padding_is_removed_before_normalising():
    loss, support = loss_of(DENSE), cache(DENSE)
    hidden, padded, exact = states(), linear(rows=V + 3), linear(rows=V)
    with torch.no_grad():
        exact.projection.weight.copy_(padded.projection.weight[:V])
        exact.projection.bias.copy_(padded.projection.bias[:V])
        padded.projection.bias[V:] = 50.0  # would take all probability
    total, _ = chunked_loss(hidden, padded, loss, support, **SETTINGS)
    expected, _ = chunked_loss(hidden, exact, loss, support, **SETTINGS)
    assert_same([total], [expected])
    assert gradients(total, padded.projection.weight)[0][V:].abs().max() == 0


@each_estimator
def test_tied_weights_collect_both_gradients(name):
    loss, support = loss_of(ESTIMATORS[name]), cache(ESTIMATORS[name])
    embedding, head = nn.Embedding(V, D), linear(bias=False)
    head.projection.weight = embedding.weight
    tokens = torch.arange(N) % V
    total, _ = chunked_loss(embedding(tokens).tanh(), head, loss, support, **SETTINGS, chunk=3)
    expected, _ = naive_loss(embedding(tokens).tanh(), head, loss, support, **SETTINGS)
    total.backward()
    tied = embedding.weight.grad
    assert_same([tied], gradients(expected, embedding.weight))
    head_alone, _ = chunked_loss(
        embedding(tokens).tanh().detach(), head, loss, support, **SETTINGS, chunk=3
    )
    assert (gradients(head_alone, head.projection.weight)[0] - tied).abs().max() > 1e-3


def test_a_frozen_head_or_frozen_states_get_no_gradient_and_the_other_the_right_one():
    loss, support, hidden, head = loss_of(DENSE), cache(DENSE), states(), linear()
    expected, _ = naive_loss(hidden, head, loss, support, **SETTINGS)
    by_hidden, by_weight = gradients(expected, hidden, head.projection.weight)
    total, _ = chunked_loss(hidden.detach(), head, loss, support, **SETTINGS, chunk=3)
    assert_same(gradients(total, head.projection.weight), [by_weight])
    head.requires_grad_(False)
    total, _ = chunked_loss(hidden, head, loss, support, **SETTINGS, chunk=3)
    total.backward()
    assert_same([hidden.grad], [by_hidden])
    assert head.projection.weight.grad is None
    total, _ = chunked_loss(hidden.detach(), head, loss, support, **SETTINGS, chunk=3)
    assert not total.requires_grad


def test_the_gradient_scales_with_what_follows_the_loss_and_is_taken_once():
    support, hidden = cache(DENSE), states()
    once, cubed = (
        chunked_loss(hidden, linear(), loss_of(DENSE), support, **SETTINGS, chunk=4)[0]
        for _ in range(2)
    )
    slope = torch.autograd.grad(once, hidden, retain_graph=True)[0]
    factor = 1.5 * cubed.detach() ** 2
    assert_same(torch.autograd.grad(cubed**3 / 2, hidden), [factor * slope])
    with pytest.raises(RuntimeError, match="have been taken"):
        torch.autograd.grad(once, hidden)


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@each_estimator
def test_micro_batches_of_any_size_give_the_gradient_of_the_step(name, parts):
    # The sum is divided by the number of tokens in the step, not in the micro-batch.
    loss, support = loss_of(ESTIMATORS[name]), cache(ESTIMATORS[name], n=29)
    hidden, head = states(29), linear()
    whole, _ = naive_loss(hidden, head, loss, support, **SETTINGS)
    expected = gradients(whole / 29, hidden, head.projection.weight, head.projection.bias)
    stops = [29 * (i + 1) ** 2 // parts**2 for i in range(parts)]  # uneven, some empty
    for start, stop in zip([0, *stops], stops, strict=False):
        piece = slice(start, stop)
        total, _ = chunked_loss(hidden[piece], head, loss, support[piece], **SETTINGS, chunk=3)
        (total / 29).backward()
    assert_same((hidden.grad, head.projection.weight.grad, head.projection.bias.grad), expected)


@each_estimator
def test_no_tokens_give_a_zero_with_zero_gradients(name):
    hidden, head = states(0), linear()
    support = cache(ESTIMATORS[name])[:0]
    total, statistics = chunked_loss(hidden, head, loss_of(ESTIMATORS[name]), support, **SETTINGS)
    assert total.item() == 0
    total.backward()
    assert hidden.grad.shape == (0, D)
    assert head.projection.weight.grad.abs().max() == 0
    assert statistics["kl"].shape == (0,)


# Temperature


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.4])
def test_the_ratio_of_a_fresh_token_is_one_at_the_samplers_temperature(temperature):
    hidden, head, estimator = states(), linear(), poisson(8, 0.75)
    p_old = (head(hidden).detach() / temperature).log_softmax(-1)
    support = cache_for(estimator, p_old, cache(DENSE).teacher_logprobs.reshape(N, V))
    given = {"vocabulary": V, "temperature": temperature, "chunk": 3}
    _, statistics = chunked_loss(hidden, head, loss_of(estimator), support, **given)
    torch.testing.assert_close(statistics["ratio"], torch.ones(N), atol=1e-5, rtol=0)
    given["temperature"] += 0.1
    _, statistics = chunked_loss(hidden, head, loss_of(estimator), support, **given)
    assert (statistics["ratio"] - 1).abs().max() > 0.01


# Memory and work


def test_the_head_sees_each_position_once_and_no_more_than_a_chunk():
    head = linear()
    total, _ = chunked_loss(states(), head, loss_of(DENSE), cache(DENSE), **SETTINGS, chunk=4)
    total.backward()
    assert head.finish.calls == [(4, True), (4, True), (3, True)]


class PeakMemory(TorchDispatchMode):
    """Counts the elements of live storages, in forward and backward passes alike."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self.alive[reference.cdata] = (reference, storage.nbytes())
        self.alive = {key: x for key, x in self.alive.items() if not x[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


@pytest.mark.parametrize(
    "estimator",
    [poisson(8, 1.0), ForwardKL(cache=TeacherTopK(k=3))],
    ids=["poisson", "teacher_top_k"],
)
def test_memory_is_that_of_one_chunk_however_many_there_are(estimator):
    vocabulary, chunk = 2000, 16
    head, loss = linear(rows=vocabulary), loss_of(estimator)

    def peak(run, n: int, **given) -> float:
        support, hidden = cache(estimator, n, vocabulary), states(n)
        with PeakMemory() as memory:
            total, _ = run(
                hidden, head, loss, support, vocabulary=vocabulary, temperature=1.0, **given
            )
            gradients(total, hidden, head.projection.weight, head.projection.bias)
        return memory.peak / (4 * chunk * vocabulary)  # in chunks of float32 logits

    few, many = (peak(chunked_loss, n, chunk=chunk) for n in (chunk, 8 * chunk))
    assert many < few + 0.5
    assert many < 7.5, "a chunk's logits, probabilities, gradients, and the head's gradients"
    assert peak(naive_loss, 8 * chunk) > 4 * many, "what the chunks save, seen by the same count"


def test_evaluation_computes_values_without_gradients():
    head, loss, support = linear(), loss_of(DENSE), cache(DENSE)
    expected, _ = naive_loss(states(), head, loss, support, **SETTINGS)
    head.finish.calls.clear()
    with torch.no_grad():
        total, statistics = chunked_loss(states(), head, loss, support, **SETTINGS, chunk=4)
    assert head.finish.calls == [(4, False), (4, False), (3, False)]
    assert not total.requires_grad
    assert_same([total], [expected.detach()])
    assert statistics["kl"].shape == (N,)


def test_chunks_shrink_as_vocabularies_grow_and_never_vanish():
    assert positions_per_chunk(152_000) * 152_000 <= LOGITS_PER_CHUNK
    assert positions_per_chunk(353) > positions_per_chunk(152_000) > 64
    assert positions_per_chunk(10**9) == 1


def test_states_and_cache_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="10 hidden states for 11 cached tokens"):
        chunked_loss(states()[1:], linear(), loss_of(DENSE), cache(DENSE), **SETTINGS)


# bfloat16


@each_estimator
def test_a_bfloat16_head_has_the_loss_of_its_logits_in_float32(name):
    loss, support = loss_of(ESTIMATORS[name]), cache(ESTIMATORS[name])
    hidden, head = states(dtype=torch.bfloat16), linear(dtype=torch.bfloat16)
    inputs = (hidden, head.projection.weight, head.projection.bias)
    total, statistics = chunked_loss(hidden, head, loss, support, **SETTINGS, chunk=4)
    assert total.dtype == statistics["kl"].dtype == torch.float32
    expected, _ = naive_loss(hidden, head, loss, support, **SETTINGS)
    assert_same([total], [expected])
    actual = gradients(total / N, *inputs)
    assert_same(actual, gradients(expected / N, *inputs), tolerance=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_zero_estimator
def test_a_student_that_is_the_teacher_has_zero_loss_and_gradient(name, dtype):
    hidden, head = states(dtype=dtype), linear(dtype=dtype)
    q = head(hidden).detach().float().log_softmax(-1)
    support = cache_for(ESTIMATORS[name], cache(DENSE).teacher_logprobs.reshape(N, V), q)
    total, _ = chunked_loss(hidden, head, loss_of(ESTIMATORS[name]), support, **SETTINGS, chunk=4)
    slopes = gradients(total, hidden, head.projection.weight)
    assert_same([total, *slopes], [torch.zeros_like(x) for x in (total, *slopes)], 1e-5)


def test_gradients_of_many_bfloat16_chunks_do_not_drown_in_rounding():
    # Added up in bfloat16, 600 equal contributions stall at 256 times one of them.
    n = 600
    hidden = torch.ones(n, D, dtype=torch.bfloat16)
    head = linear(dtype=torch.bfloat16)
    one = cache(ForwardKL(cache=TeacherTopK(k=3)), n=1)
    loss = loss_of(ForwardKL(cache=TeacherTopK(k=3)))
    first, _ = chunked_loss(hidden[:1], head, loss, one, **SETTINGS)
    by_one = gradients(first, head.projection.weight)[0].float()

    def repeated(learner_logprobs, support):
        return loss(learner_logprobs, one)

    total, _ = chunked_loss(
        hidden, head, repeated, cache(ESTIMATORS["sampled"], n=n), **SETTINGS, chunk=1
    )
    assert_same([gradients(total, head.projection.weight)[0].float()], [n * by_one], tolerance=0.01)


def test_autocast_reaches_the_head_and_every_chunk():
    loss, support, hidden, head = loss_of(DENSE), cache(DENSE), states(), linear()
    inputs = (hidden, head.projection.weight, head.projection.bias)
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = chunked_loss(hidden, head, loss, support, **SETTINGS, chunk=3)
        expected, _ = naive_loss(hidden, head, loss, support, **SETTINGS)
    exact, _ = naive_loss(hidden, head, loss, support, **SETTINGS)
    assert_same([total], [expected])
    assert total.item() != pytest.approx(exact.item(), rel=1e-6), "the head ran in bfloat16"
    assert_same(gradients(total, *inputs), gradients(expected, *inputs), tolerance=0.01)


# The teacher's head beside the student's


def of_hidden(hidden: Tensor, support: Support) -> Support:
    """The same tokens, with the teacher's states in place of scores."""
    nothing = torch.zeros(0)
    columns = vars(support) | {
        "offsets": torch.zeros(len(hidden) + 1, dtype=torch.int64),
        "teacher_logprobs": nothing,
        "sampler_logprobs": nothing,
        "proximal_logprobs": nothing,
        "teacher_hidden": hidden,
    }
    return Support(**{name: columns[name] for name in Support.__dataclass_fields__})


def teacher_states(n: int = N) -> tuple[Tensor, Head]:
    """Of a teacher wider than the student."""
    generator = torch.Generator().manual_seed(7)
    projection = nn.Linear(2 * D, V + 2)
    nn.init.normal_(projection.weight, generator=generator)
    hidden = torch.randn(n, 2 * D, generator=generator)
    return hidden, Head(projection, Watched(softcap=3.0))


@pytest.mark.parametrize("chunk", [1, 4, N, None])
@pytest.mark.parametrize(
    "make",
    [
        lambda cache: ReverseKL(cache=cache),
        lambda cache: ForwardKL(cache=cache),
        lambda cache: JensenShannon(beta=0.0, cache=cache),
        lambda cache: JensenShannon(beta=0.3, cache=cache),
        lambda cache: JensenShannon(beta=1.0, cache=cache),
    ],
)
def test_hidden_states_of_the_teacher_give_the_loss_of_its_whole_vocabulary(make, chunk):
    hidden, head = states(), linear()
    theirs, their_head = teacher_states()
    with torch.no_grad():  # at a temperature of its own, without its two padded ids
        log_q = (their_head(theirs)[:, :V] / 0.7).log_softmax(-1)
    dense = make(Dense())
    support = cache_for(dense, torch.randn(N, V).log_softmax(-1), log_q)
    inputs = (hidden, head.projection.weight, head.projection.bias)
    expected, expected_statistics = naive_loss(hidden, head, loss_of(dense), support, **SETTINGS)
    teacher = TeacherHead(their_head, V, 0.7)
    loss = loss_of(make(TeacherHidden()))
    total, statistics = chunked_loss(
        hidden, head, loss, of_hidden(theirs, support), **SETTINGS, teacher=teacher, chunk=chunk
    )
    assert_same([total], [expected])
    assert_same(gradients(total, *inputs), gradients(expected, *inputs))
    assert_same(statistics.values(), expected_statistics.values())
    assert all(parameter.grad is None for parameter in their_head.parameters())


def test_hidden_states_without_the_teachers_head_are_refused():
    hidden, _ = teacher_states()
    support = of_hidden(hidden, cache(DENSE))
    loss = loss_of(ReverseKL(cache=TeacherHidden()))
    with pytest.raises(ValueError, match="without its head"):
        chunked_loss(states(), linear(), loss, support, **SETTINGS)
    empty, _ = chunked_loss(states(0), linear(), loss, support[:0], **SETTINGS)
    assert empty.item() == 0
