"""Weights packed, sent and loaded."""

import pickle

import numpy as np
import pytest
import torch
from torch import nn

from engine.weights import Weights, load_into, publish


def tensors() -> dict[str, torch.Tensor]:
    """Mixed types and shapes; sizes that leave the next tensor at odd places."""
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(3, 5, generator=generator),
        "half": torch.randn(7, generator=generator).to(torch.bfloat16),
        "steps": torch.tensor([3, -1, 2**40]),
        "scalar": torch.tensor(1.25),
        "flags": torch.tensor([True, False, True]),
        "transposed": torch.randn(4, 2, generator=generator).T,
        "none": torch.zeros(0, 4),
        "last": torch.randn(1, 2, 3, generator=generator),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_published_is_read_by_name_shape_and_value(dtype):
    given = tensors()
    weights = publish(given.items(), 7, dtype)
    read = dict(weights.tensors())
    assert weights.version == 7
    assert list(read) == list(given)
    for name, tensor in given.items():
        expected = tensor.to(dtype) if tensor.is_floating_point() else tensor
        assert read[name].dtype == expected.dtype
        assert read[name].shape == tensor.shape
        assert torch.equal(read[name], expected), name


def test_the_size_is_that_of_the_tensors_in_the_published_type():
    weights = publish(tensors().items(), 1, torch.bfloat16)
    # Floating point 15 + 7 + 1 + 8 + 0 + 6 = 37 of 2 bytes, 3 of 8 bytes, 3 of 1 byte.
    assert weights.nbytes == 2 * 37 + 3 * 8 + 3
    assert len(weights.buffers) == 3, "one buffer for each type"


def test_tensors_are_views_of_the_buffer():
    weights = publish(tensors().items(), 1, torch.float32)
    one, other = dict(weights.tensors()), dict(weights.tensors())
    for name in ("matrix", "last", "steps"):
        assert one[name].data_ptr() == other[name].data_ptr()
    buffer = weights.buffers[torch.float32]
    start = buffer.__array_interface__["data"][0]
    assert start <= one["last"].data_ptr() < start + buffer.nbytes


@pytest.mark.parametrize("alone", [True, False])
def test_published_weights_do_not_change_when_training_goes_on(alone):
    live = {"a": torch.ones(4), "b": torch.ones(2)}
    if alone:
        del live["b"]
    weights = publish(live.items(), 1, torch.float32)
    for tensor in live.values():
        tensor.zero_()
    assert all(torch.equal(t, torch.ones_like(t)) for _, t in weights.tensors())


def test_read_only_buffers_of_another_process_are_read_without_a_warning():
    sent = pickle.loads(pickle.dumps(publish(tensors().items(), 3, torch.bfloat16)))
    for buffer in sent.buffers.values():
        buffer.flags.writeable = False
    assert torch.equal(dict(sent.tensors())["steps"], tensors()["steps"])
    assert sent.version == 3


def network(width: int = 3, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, width), nn.Linear(width, 2, bias=bias))


def test_loading_makes_a_model_of_the_same_architecture_equal():
    trained, worker = network(), network()
    weights = publish(trained.named_parameters(), 1, torch.float32)
    load_into(worker, weights)
    inputs = torch.randn(5, 2)
    assert torch.equal(trained(inputs), worker(inputs))
    load_into(worker, weights)
    assert torch.equal(trained(inputs), worker(inputs)), "loading twice changes nothing"
    assert all(p.requires_grad for p in worker.parameters())


def test_loading_copies_and_leaves_the_published_weights_alone():
    weights = publish(network().named_parameters(), 1, torch.float32)
    before = {name: tensor.clone() for name, tensor in weights.tensors()}
    worker = network()
    load_into(worker, weights)
    with torch.no_grad():
        for parameter in worker.parameters():
            parameter.add_(1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights.tensors())


def test_bfloat16_weights_load_into_a_float32_model():
    trained, worker = network(), network()
    load_into(worker, publish(trained.named_parameters(), 1, torch.bfloat16))
    for one, other in zip(trained.parameters(), worker.parameters(), strict=True):
        assert other.dtype == torch.float32
        assert torch.equal(one.to(torch.bfloat16).float(), other)


def test_tied_weights_are_sent_once_and_stay_tied():
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        model[1].weight = model[0].weight
        return model

    trained, worker = tied(), tied()
    weights = publish(trained.named_parameters(), 1, torch.float32)
    assert [entry.name for entry in weights.entries] == ["0.weight"]
    load_into(worker, weights)
    assert worker[1].weight is worker[0].weight
    assert torch.equal(worker[1].weight, trained[1].weight)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (network(bias=False), "1.bias"),  # a tensor too few
        (nn.Sequential(*network(), nn.Linear(2, 2)), "2.bias"),  # a tensor too many
        (network(width=1), "0.weight"),  # the same names: copying would spread one row over three
    ],
)
def test_weights_of_another_architecture_are_refused_and_nothing_is_copied(other, named):
    worker = network()
    before = [parameter.clone() for parameter in worker.parameters()]
    weights = publish(other.named_parameters(), 1, torch.float32)
    with pytest.raises(ValueError, match=f"don't fit the model.*{named}"):
        load_into(worker, weights)
    assert all(map(torch.equal, worker.parameters(), before))


def test_no_tensors_make_empty_weights():
    weights = publish([], 0, torch.float32)
    assert isinstance(weights, Weights)
    assert weights.nbytes == 0
    assert list(weights.tensors()) == []
    assert np.sum([b.nbytes for b in weights.buffers.values()]) == 0
