"""Weights packed, sent and loaded."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine.names import WeightsMismatchError, in_folder
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


def model(seed: int = 0, **sizes: int | bool) -> Any:
    torch.manual_seed(seed)
    settings = {"vocab_size": 30, "hidden_size": 8, "intermediate_size": 12, "head_dim": 8}
    settings |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    return Qwen3ForCausalLM(Qwen3Config(**settings | sizes)).eval()


def logits(one: Any) -> torch.Tensor:
    with torch.no_grad():
        return one(input_ids=torch.arange(12)[None]).logits


def published(one: Any, dtype: torch.dtype = torch.float32) -> Weights:
    return publish(in_folder(one).items(), 1, dtype)


def test_loading_makes_a_model_of_the_same_architecture_equal():
    trained, worker = model(1), model(2)
    load_into(worker, published(trained))
    assert torch.equal(logits(trained), logits(worker))
    load_into(worker, published(trained))
    assert torch.equal(logits(trained), logits(worker)), "loading twice changes nothing"
    assert all(p.requires_grad for p in worker.parameters())


def test_loading_copies_and_leaves_the_published_weights_alone():
    weights = published(model())
    before = {name: tensor.clone() for name, tensor in weights.tensors()}
    worker = model(1)
    load_into(worker, weights)
    with torch.no_grad():
        for parameter in worker.parameters():
            parameter.add_(1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights.tensors())


def test_weights_of_another_type_are_refused_and_nothing_is_copied():
    worker = model(2)
    before = [parameter.clone() for parameter in worker.parameters()]
    with pytest.raises(WeightsMismatchError, match=r"should be torch\.float32, but .* are not"):
        load_into(worker, published(model(1), torch.bfloat16))
    assert all(map(torch.equal, worker.parameters(), before))


def test_tied_weights_are_sent_once_and_stay_tied():
    trained, worker = (model(seed, tie_word_embeddings=True) for seed in (1, 2))
    weights = published(trained)
    names = [entry.name for entry in weights.entries]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    load_into(worker, weights)
    assert worker.lm_head.weight is worker.model.embed_tokens.weight
    assert torch.equal(worker.lm_head.weight, trained.lm_head.weight)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"attention_bias": True}, "self_attn.k_proj.bias"),  # tensors too many
        ({"tie_word_embeddings": True}, "lm_head.weight"),  # one too few
        ({"intermediate_size": 1}, "mlp.down_proj.weight"),  # copying would spread one row
    ],
)
def test_weights_of_another_architecture_are_refused_and_nothing_is_copied(sizes, named):
    worker = model()
    before = [parameter.clone() for parameter in worker.parameters()]
    with pytest.raises(WeightsMismatchError, match=f"don't fit the model.*{named}"):
        load_into(worker, published(model(1, **sizes)))
    assert all(map(torch.equal, worker.parameters(), before))


def test_no_tensors_make_empty_weights():
    weights = publish([], 0, torch.float32)
    assert isinstance(weights, Weights)
    assert weights.nbytes == 0
    assert list(weights.tensors()) == []
    assert np.sum([b.nbytes for b in weights.buffers.values()]) == 0
