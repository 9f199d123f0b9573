"""Model folders of several families, taken apart into body and head."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.config import ConfigError
from engine.models import (
    digest,
    load_config,
    load_tokenizer,
    pick_dtype,
    resolve,
    stop_ids,
)
from tests.engine.tiny import CPU, language, random_ids

SIZES = {
    "vocab_size": 70,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
}


class ScaledConfig(Qwen3Config):
    model_type = "scaled_for_a_test"


class ScaledForCausalLM(Qwen3ForCausalLM):
    """Does to its logits what no other family does."""

    config_class = ScaledConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 1.1
        return output


AutoConfig.register(ScaledConfig.model_type, ScaledConfig, exist_ok=True)
AutoModelForCausalLM.register(ScaledConfig, ScaledForCausalLM, exist_ok=True)


def saved(model, tokenizer, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# Finding a model


def test_a_model_folder_resolves_to_itself_from_any_directory(tiny_student, monkeypatch):
    assert resolve(str(tiny_student)) == tiny_student
    monkeypatch.chdir(tiny_student.parent)
    assert resolve(tiny_student.name) == tiny_student


def test_a_folder_without_a_config_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=rf"{tmp_path}.*config\.json"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    "path", ["/no/such/folder", "./missing", "models/of/mine", "~/nothing-here"]
)
def test_a_missing_folder_is_refused_by_name(path):
    with pytest.raises(ConfigError, match=f"{path}: no such model folder"):
        resolve(path)


@pytest.mark.parametrize("name", ["nobody/no-such-model", "not a name"])
def test_a_name_that_the_hub_does_not_give_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"{name}: neither a folder here nor"):
        resolve(name)


def test_a_broken_config_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(ConfigError, match=f"{tmp_path}: the model's config.json"):
        load_config(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused_by_name(tiny_student, tmp_path):
    shutil.copy(tiny_student / "config.json", tmp_path)
    with pytest.raises(ConfigError, match=f"{tmp_path}: the tokenizer"):
        load_tokenizer(tmp_path)


# What a folder says


def test_stop_ids_are_the_tokenizers_and_all_of_the_generation_config(
    tiny_student, tiny_tokenizer, tmp_path
):
    folder = shutil.copytree(tiny_student, tmp_path / "model")
    eos = tiny_tokenizer.eos_token_id
    assert stop_ids(folder, tiny_tokenizer) == [eos]
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text())
    path.write_text(json.dumps(generation | {"eos_token_id": [9, 0]}))
    assert stop_ids(folder, tiny_tokenizer) == sorted({0, 9, eos})
    path.write_text(json.dumps(generation | {"eos_token_id": 7}))
    assert stop_ids(folder, tiny_tokenizer) == sorted({7, eos})
    path.unlink()
    assert stop_ids(folder, tiny_tokenizer) == [eos]


def test_the_digest_changes_with_one_weight_and_with_the_config_and_not_with_the_place(
    tiny_student, tmp_path
):
    original = digest(tiny_student)
    folder = shutil.copytree(tiny_student, tmp_path / "model")
    assert digest(folder) == original
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] += 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert digest(folder) != original
    other = shutil.copytree(tiny_student, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert digest(other) != original


def test_auto_is_float32_on_a_cpu_and_bfloat16_on_a_gpu():
    assert pick_dtype("auto", CPU) == torch.float32
    assert pick_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert pick_dtype("bfloat16", CPU) == torch.bfloat16


def test_the_vocabulary_is_the_tokenizers_not_the_padded_embeddings(tiny_student, tiny_tokenizer):
    model = language(tiny_student)
    assert model.vocabulary == len(tiny_tokenizer)
    assert model.vocabulary < model.model.config.vocab_size
    states = torch.randn(3, 16)
    assert model.logprobs(states, 1.0).shape == (3, len(tiny_tokenizer))
    assert model.logprobs(states, 0.7).logsumexp(-1).abs().max() < 1e-5


# Body and head


def qwen(tied: bool) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=tied))


def gemma() -> Gemma2ForCausalLM:
    config = Gemma2Config(
        **SIZES, head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=2.0, sliding_window=4
    )
    return Gemma2ForCausalLM(config)


def granite() -> GraniteForCausalLM:
    return GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=3.0))


def cohere() -> Cohere2ForCausalLM:
    return Cohere2ForCausalLM(Cohere2Config(**SIZES, logit_scale=0.5))


FAMILIES = {
    "tied": lambda: qwen(True),
    "untied": lambda: qwen(False),
    "softcapped": gemma,
    "divided": granite,
    "multiplied": cohere,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_body_and_head_together_are_the_model(family, tiny_tokenizer, tmp_path):
    torch.manual_seed(0)
    ours = language(saved(FAMILIES[family](), tiny_tokenizer, tmp_path))
    ids = torch.tensor([random_ids(12, 0, 50)])
    with torch.no_grad():
        states = ours.model.base_model(input_ids=ids).last_hidden_state[0]
        expected = ours.model(input_ids=ids).logits[0, :, : ours.vocabulary].log_softmax(-1)
    assert expected.std() > 0.1  # there is something to get wrong
    torch.testing.assert_close(ours.logprobs(states, 1.0), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_is_the_model(family, tiny_tokenizer, tmp_path):
    torch.manual_seed(0)
    first = language(saved(FAMILIES[family](), tiny_tokenizer, tmp_path / "first"))
    with torch.no_grad():
        for parameter in first.model.parameters():
            parameter += 0.125
    first.save(tmp_path / "second")
    second = language(tmp_path / "second")
    given, read = first.tensors(), load_file(tmp_path / "second" / "model.safetensors")
    assert given.keys() == read.keys() == second.tensors().keys()
    for name, tensor in second.tensors().items():
        assert torch.equal(tensor, given[name])
        assert torch.equal(tensor, read[name])


def test_a_model_whose_logits_are_scaled_in_an_unknown_way_is_refused(tiny_tokenizer, tmp_path):
    torch.manual_seed(0)
    model = ScaledForCausalLM(ScaledConfig(**SIZES, head_dim=8))
    folder = saved(model, tiny_tokenizer, tmp_path)
    with pytest.raises(ConfigError, match="ScaledForCausalLM computes its logits"):
        language(folder)


def test_decoding_leaves_out_special_tokens(tiny_student, tiny_tokenizer):
    ids = [*tiny_tokenizer.encode("ab c"), tiny_tokenizer.eos_token_id]
    assert language(tiny_student).decode(ids) == "ab c"
