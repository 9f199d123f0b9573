"""AdamW and Muon against their oracles, and the schedule by hand."""

import pytest
import torch
from torch import Tensor, nn

from engine.config import OptimizerConfig
from engine.optimizer import Muon, Optimizer, orthogonalise
from tests.engine.tiny import language


def matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


class Toy(nn.Module):
    """A language model's parts, by the names that the optimizer asks for."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 4)
        self.tall, self.wide = nn.Linear(4, 12), nn.Linear(12, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def set_gradients(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)


def config(**settings) -> OptimizerConfig:
    return OptimizerConfig(**({"lr": 0.01, "warmup_steps": 0} | settings))


# Muon


@pytest.mark.parametrize("shape", [(8, 8), (4, 20), (20, 4), (33, 32)], ids=str)
def test_orthogonalise_brings_all_singular_values_near_1_in_the_same_directions(shape):
    original = matrix(*shape)
    (result,) = orthogonalise(original[None])
    u, s, vt = torch.linalg.svd(original, full_matrices=False)
    inner = u.mT @ result @ vt.mT
    # Singular values below 1/100 of the norm may need more than five steps.
    large = s > 0.01 * original.norm()
    values = inner.diagonal()[large]
    assert large.sum() >= len(s) - 1
    assert bool(((values > 0.6) & (values < 1.3)).all())
    assert (inner - inner.diagonal().diag()).abs().max() < 1e-3  # U and V are the matrix's own


def test_orthogonalise_treats_each_matrix_of_a_batch_as_if_it_were_alone():
    stack = torch.stack([matrix(6, 9, 1), 1e-4 * matrix(6, 9, 2), 1e4 * matrix(6, 9, 3)])
    together = orthogonalise(stack)
    for one, alone in zip(together, stack, strict=True):
        torch.testing.assert_close(one, orthogonalise(alone[None])[0])


def test_orthogonalise_leaves_a_matrix_of_zeros_at_zero():
    assert torch.equal(orthogonalise(torch.zeros(1, 3, 5)), torch.zeros(1, 3, 5))


def test_muon_is_torchs_muon_up_to_bfloat16():
    shapes = [(12, 4), (4, 12), (8, 8), (12, 4)]
    ours = [nn.Parameter(matrix(*shape, seed)) for seed, shape in enumerate(shapes)]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    start = [p.detach().clone() for p in ours]
    lr = 0.02
    mine = Muon(ours, lr, weight_decay=0.1)
    reference = torch.optim.Muon(theirs, lr=lr, weight_decay=0.1)
    for step in range(3):  # the second and third have momentum
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            a.grad = matrix(*a.shape, seed=100 * step + index)
            b.grad = a.grad.clone()
        mine.step()
        reference.step()
        for a, b, from_ in zip(ours, theirs, start, strict=True):
            moved, expected = a.detach() - from_, b.detach() - from_
            # bfloat16 has three digits, and theirs loses some in each of five iterations.
            assert (moved - expected).norm() < 0.03 * expected.norm()


def test_muon_takes_the_hidden_matrices_only():
    model = Toy()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = Optimizer(model, config(type="muon", lr=1e-9, matrix_lr=0.1), steps=10)
    optimizer.schedule(0)
    model.set_gradients(0)
    optimizer.step()
    moved = {
        name
        for name, p in model.named_parameters()
        if (p.detach() - before[name]).abs().max() > 1e-3
    }
    assert moved == {"tall.weight", "wide.weight"}


def test_a_real_models_embedding_and_norms_are_left_to_adamw(tiny_student):
    model = language(tiny_student).model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = Optimizer(model, config(type="muon", lr=1e-9, matrix_lr=0.1), steps=10)
    optimizer.schedule(0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, p in model.named_parameters():
        moved = bool((p.detach() - before[name]).abs().max() > 1e-4)
        assert moved == (name.endswith("_proj.weight")), name


def test_each_expert_of_a_stack_is_orthogonalised_by_itself():
    generator = torch.Generator().manual_seed(0)
    stack = torch.nn.Parameter(torch.zeros(3, 6, 4))
    single = [torch.nn.Parameter(torch.zeros(6, 4)) for _ in range(3)]
    stack.grad = torch.randn(3, 6, 4, generator=generator)
    for one, gradient in zip(single, stack.grad, strict=True):
        one.grad = gradient.clone()
    Muon([stack], 0.1).step()
    Muon(single, 0.1).step()
    torch.testing.assert_close(stack.detach(), torch.stack([one.detach() for one in single]))


# AdamW


def test_adamws_first_step_is_the_sign_of_the_gradient_by_hand():
    model = Toy()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = Optimizer(model, config(weight_decay=0.5), steps=10)
    assert optimizer.schedule(0) == 0.01
    model.set_gradients(1)
    optimizer.step()
    for name, p in model.named_parameters():
        decay = 1 - 0.01 * 0.5 if p.ndim == 2 else 1  # norms and biases aren't decayed
        expected = before[name] * decay - 0.01 * p.grad.sign()
        torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("type_", ["adamw", "muon"])
def test_a_tied_weight_is_updated_once(type_):
    model = Toy(tied=True)
    before = model.embedding.weight.detach().clone()
    optimizer = Optimizer(model, config(type=type_), steps=10)
    optimizer.schedule(0)
    model.set_gradients(1)
    optimizer.step()
    expected = before - 0.01 * model.embedding.weight.grad.sign()
    torch.testing.assert_close(model.head.weight.detach(), expected, rtol=0, atol=1e-5)


# Schedule


def rates(steps: int, **settings) -> list[float]:
    optimizer = Optimizer(Toy(), config(lr=1.0, **settings), steps)
    return [optimizer.schedule(version) for version in range(steps)]


def test_the_rate_rises_to_its_peak_and_falls_to_its_final_fraction():
    # Rise in 3 steps below the peak; then from 1 to 0.2 in 4 equal parts.
    expected = [0.25, 0.5, 0.75, 1.0, 0.8, 0.6, 0.4, 0.2]
    assert rates(8, warmup_steps=3, final_fraction=0.2) == pytest.approx(expected)


def test_without_warmup_the_first_step_has_the_peak():
    assert rates(3, final_fraction=0.0) == pytest.approx([1.0, 0.5, 0.0])


def test_a_run_of_one_step_and_one_that_is_all_warmup_have_rates():
    assert rates(1, final_fraction=0.1) == [1.0]
    assert rates(2, warmup_steps=5) == pytest.approx([1 / 6, 2 / 6])


def test_the_rate_stays_at_its_final_fraction_beyond_the_end():
    optimizer = Optimizer(Toy(), config(lr=1.0, final_fraction=0.1), steps=3)
    assert optimizer.schedule(9) == pytest.approx(0.1)


def test_both_optimizers_follow_the_schedule():
    model = Toy()
    settings = config(type="muon", lr=0.4, matrix_lr=0.8, final_fraction=0.5)
    optimizer = Optimizer(model, settings, steps=3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert optimizer.schedule(2) == pytest.approx(0.2)  # half of the peak
    model.set_gradients(1)
    optimizer.step()
    moved = model.norm.bias.detach() - before["norm.bias"]
    torch.testing.assert_close(moved, -0.2 * model.norm.bias.grad.sign(), rtol=0, atol=1e-5)
    moved = model.wide.weight.detach() - before["wide.weight"]
    (update,) = orthogonalise(model.wide.weight.grad[None])
    torch.testing.assert_close(moved, -0.4 * update, rtol=0, atol=1e-5)


# State


@pytest.mark.parametrize("type_", ["adamw", "muon"])
def test_an_optimizer_with_a_restored_state_goes_on_bit_for_bit(type_):
    settings = config(type=type_, weight_decay=0.1)
    model, other = Toy(), Toy()
    optimizer = Optimizer(model, settings, steps=10)

    def train(model: Toy, optimizer: Optimizer, version: int) -> None:
        optimizer.schedule(version)
        model.set_gradients(version)
        optimizer.step()

    for version in range(3):
        train(model, optimizer, version)
    saved = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    other.load_state_dict(model.state_dict())
    restored = Optimizer(other, settings, steps=10)
    train(other, restored, 7)  # it has a state of its own that must go
    other.load_state_dict(model.state_dict())
    restored.load_state(saved)
    again = restored.state()
    assert again.keys() == saved.keys()
    assert all(torch.equal(again[name], saved[name]) for name in saved)
    for version in (3, 4):
        train(model, optimizer, version)
        train(other, restored, version)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_empty_state_clears_what_there_was():
    model = Toy()
    optimizer = Optimizer(model, config(), steps=3)
    model.set_gradients(0)
    optimizer.step()
    optimizer.load_state({})
    assert optimizer.state() == {}
