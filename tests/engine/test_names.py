"""Names and shapes in memory and in the folder, for families that transformers converts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from engine.names import WeightsMismatchError, fill, in_folder

SIZES = {
    "vocab_size": 30,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
MOE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
FAMILIES = {
    "nothing converted": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=8)),
    "fused experts": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **MOE, head_dim=8)),
    "fused and renamed experts": (MixtralForCausalLM, MixtralConfig(**SIZES, num_local_experts=3)),
    "renamed head": (GPTNeoXForCausalLM, GPTNeoXConfig(**SIZES)),
}


def saved(family: str, folder: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    kind, config = FAMILIES[family]
    torch.manual_seed(seed)
    kind(config).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def loaded(family: str, folder: Path) -> Any:
    return FAMILIES[family][0].from_pretrained(folder).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_names_its_tensors_as_its_folder_does(family, tmp_path):
    disk = saved(family, tmp_path)
    named = in_folder(loaded(family, tmp_path))
    assert named.keys() == disk.keys()
    assert all(torch.equal(named[name], disk[name]) for name in disk)


@pytest.mark.parametrize("family", ["nothing converted", "renamed head"])
def test_what_is_not_converted_is_not_copied(family, tmp_path):
    saved(family, tmp_path)
    model = loaded(family, tmp_path)
    own = {tensor.data_ptr() for tensor in model.parameters()}
    assert {tensor.data_ptr() for tensor in in_folder(model).values()} == own


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_filled_from_a_folder_is_the_one_that_is_loaded_from_it(family, tmp_path):
    saved(family, tmp_path / "one", seed=1)
    other = saved(family, tmp_path / "other", seed=2)
    model = loaded(family, tmp_path / "one")
    parameters = dict(model.named_parameters())
    fill(model, other)
    for name, expected in loaded(family, tmp_path / "other").named_parameters():
        assert parameters[name] is model.get_parameter(name), "an optimizer holds these objects"
        assert torch.equal(parameters[name], expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "in memory"])
def test_other_names_and_shapes_are_refused_and_nothing_is_written(family, fault, tmp_path):
    named = saved(family, tmp_path / "other", seed=2)
    saved(family, tmp_path / "one", seed=1)
    model = loaded(family, tmp_path / "one")
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    name = list(named)[-1]
    if fault == "missing":
        del named[name]
    elif fault == "unknown":
        named["model.layers.0.more.weight"] = torch.zeros(2)
    elif fault == "shape":
        named[name] = named[name][..., :-1]
    else:
        named["in_memory"] = named.pop(name)
    with pytest.raises(WeightsMismatchError, match="don't fit the model"):
        fill(model, named)
    assert all(torch.equal(tensor, before[n]) for n, tensor in model.named_parameters())


def test_a_head_that_the_folder_has_twice_is_named_once(tmp_path):
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False))
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tied = Qwen3ForCausalLM.from_pretrained(tmp_path)
    named = in_folder(tied)
    assert "lm_head.weight" not in named
    fill(tied, named)
