"""Tiny models of real families, and what the tests of families do with them.

A family's folder is what its authors publish: made by transformers' own classes, names and shapes
as on the hub. `sample` drives a sampler through a swap of weights in flight, and `compare` holds
every distribution against plain forward passes.
"""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from engine.backends import Request, vllm_environment
from engine.backends.hf import HFSampler
from engine.config import Sampled
from engine.rollout import RolloutWorker
from engine.weights import publish
from tests.engine.tiny import (
    Driven,
    Response,
    language,
    logprobs_across_swap,
    logprobs_of,
    random_ids,
)

SIZES: dict[str, Any] = {
    "vocab_size": 70,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.12,  # enough for distributions that aren't flat
    "tie_word_embeddings": False,
}
HEAD = {"head_dim": 32}  # vLLM's CPU attention takes 32 or 64
TIED = {"tie_word_embeddings": True}
BEFORE_SWAP = 4
VOCABULARY = 58


@dataclass(frozen=True)
class Family:
    """One family of models, tiny."""

    kind: str
    """Its class in transformers, less `ForCausalLM`."""
    settings: dict[str, Any]
    note: str
    """What is particular to it."""
    config: str = ""
    """Its configuration's class, less `Config`, if it has another name."""
    change: Callable[[Path], None] | None = None
    """What is done to the folder that transformers writes."""

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int) -> Path:
        """Writes a folder with seeded weights."""
        config = getattr(transformers, f"{self.config or self.kind}Config")
        kind = getattr(
            transformers, self.kind + ("LMHeadModel" if self.kind == "GPT2" else "ForCausalLM")
        )
        ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = kind(config(**SIZES | self.settings | ends, dtype="float32"))
            with torch.no_grad():  # biases and norms as trained ones: neither 0 nor 1
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        parameter.add_(0.1 * torch.randn_like(parameter))
        model.generation_config = transformers.GenerationConfig(**ends)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if self.change:
            self.change(folder)
        return folder


def _head_again(folder: Path) -> None:
    """Writes a tied head into the folder a second time, as some tools do."""
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", HEAD, "plain"),
    "llama tied": Family("Llama", HEAD | TIED, "tied head"),
    "llama twice": Family(
        "Llama", HEAD | TIED, "tied head, also in the folder", change=_head_again
    ),
    "qwen2": Family("Qwen2", {}, "biases"),
    "qwen3": Family("Qwen3", HEAD | TIED, "norms of queries and keys"),
    "gemma": Family("Gemma", HEAD | TIED, "scaled embeddings"),
    "gemma2": Family(
        "Gemma2",
        HEAD
        | TIED
        | {"query_pre_attn_scalar": 32, "sliding_window": 8, "final_logit_softcapping": 3.0},
        "soft caps, windows",
    ),
    "gemma3": Family(
        "Gemma3",
        HEAD
        | TIED
        | {
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "windows, two rotary bases",
        config="Gemma3Text",
    ),
    "mistral": Family("Mistral", HEAD | {"sliding_window": 8}, "window"),
    "ministral": Family(
        "Ministral",
        HEAD | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        "window in some layers",
    ),
    "phi": Family("Phi", {}, "parallel blocks, biased head"),
    "phi3": Family("Phi3", {"pad_token_id": 0}, "fused projections"),
    "olmo": Family("Olmo", {}, "norms without weights"),
    "olmo2": Family("Olmo2", {}, "norms after blocks"),
    "olmo3": Family(
        "Olmo3",
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        "windows",
    ),
    "granite": Family(
        "Granite", {"logits_scaling": 3.0, "residual_multiplier": 0.5}, "divided logits"
    ),
    "starcoder2": Family("Starcoder2", TIED, "biases, tied head"),
    "stablelm": Family("StableLm", {}, "partial rotary"),
    "gpt_neox": Family("GPTNeoX", {}, "parallel blocks, renamed head"),
    "gptj": Family(
        "GPTJ",
        {"n_embd": 64, "n_head": 2, "n_layer": 2, "rotary_dim": 16},
        "parallel blocks, biased head",
    ),
    "gpt2": Family("GPT2", {}, "learned positions, transposed matrices"),
    "opt": Family("OPT", TIED | {"ffn_dim": 96, "word_embed_proj_dim": 64}, "learned positions"),
    "bloom": Family("Bloom", TIED, "ALiBi"),
    "mpt": Family("Mpt", TIED, "ALiBi"),
    "falcon": Family("Falcon", TIED | {"multi_query": True}, "parallel blocks, one key head"),
    "cohere": Family("Cohere", TIED | {"logit_scale": 0.5}, "parallel blocks, multiplied logits"),
    "cohere2": Family(
        "Cohere2",
        HEAD
        | TIED
        | {
            "logit_scale": 0.5,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "windows, multiplied logits",
    ),
    "glm": Family("Glm", HEAD, "interleaved rotary"),
    "glm4": Family("Glm4", HEAD, "fused gate, norms around blocks"),
    "smollm3": Family(
        "SmolLM3", TIED | {"no_rope_layers": [1, 0], "pad_token_id": 0}, "layers without positions"
    ),
    "exaone4": Family(
        "Exaone4",
        HEAD | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        "windows",
    ),
    "nemotron": Family("Nemotron", HEAD, "norms plus one"),
    "seed_oss": Family("SeedOss", HEAD, "biases"),
    "ernie": Family("Ernie4_5", HEAD | TIED, "interleaved rotary"),
    "arcee": Family("Arcee", HEAD, "squared ReLU"),
    "apertus": Family("Apertus", HEAD, "xIELU"),
    "helium": Family("Helium", HEAD, "interleaved rotary"),
    "hunyuan": Family("HunYuanDenseV1", HEAD, "norms after rotary"),
    "qwen2_moe": Family(
        "Qwen2Moe", MOE | {"shared_expert_intermediate_size": 48}, "fused experts, a shared one"
    ),
    "qwen3_moe": Family("Qwen3Moe", HEAD | MOE, "fused experts"),
    "mixtral": Family("Mixtral", HEAD | {"num_local_experts": 4}, "fused and renamed experts"),
    "olmoe": Family("Olmoe", MOE, "fused experts"),
    "phimoe": Family("Phimoe", {"num_local_experts": 4}, "fused experts, biased head"),
    "granitemoe": Family(
        "GraniteMoe",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        "experts fused in the folder",
    ),
    "gpt_oss": Family(
        "GptOss",
        HEAD
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 2.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 128,
                "rope_theta": 1e4,
                "truncate": False,
            },
        },
        "experts fused in the folder, sinks",
    ),
    "glm4_moe": Family(
        "Glm4Moe",
        HEAD
        | {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        "a dense layer, then experts",
    ),
    "ernie_moe": Family(
        "Ernie4_5_Moe",
        HEAD
        | {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_layer_start_index": 1,
        },
        "a dense layer, then experts",
    ),
    "deepseek_v3": Family(
        "DeepseekV3",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "topk_method": "noaux_tc",
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 32,
            "num_key_value_heads": 2,
        },
        "latent attention",
    ),
}
# Their notes are the reasons given.
REFUSED: dict[str, Family] = {
    "mamba": Family("Mamba", {}, "recurrent layers"),
    "lfm2": Family("Lfm2", {"layer_types": ["conv", "full_attention"]}, "conv layers"),
    "qwen3_next": Family(
        "Qwen3Next",
        HEAD | MOE | {"layer_types": ["linear_attention", "full_attention"]},
        "linear_attention layers",
    ),
    "falcon_h1": Family(
        "FalconH1",
        {"mamba_d_ssm": 64, "mamba_n_heads": 2, "mamba_d_head": 32},
        "recurrent layers",
    ),
}


@dataclass(frozen=True)
class Outcome:
    """Greatest difference of any log-probability from a plain forward pass, in nats."""

    before: float
    across: float
    after: float


Recorded = dict[int, tuple[Request, Response]]
# What vLLM 0.32 computes otherwise than transformers, or not at all, and how that is noticed before
# a run begins.
REFUSED_BY_VLLM = {
    "gpt_neox": "sampler and learner differ",
    "cohere2": "sampler and learner differ",  # its windows are one token wider
    "gpt_oss": "the worker didn't take",  # biases and sinks, on a second load
    "deepseek_v3": "not supported by MLA",  # heads as small as these
    "mpt": "not supported",
    "phimoe": "too many values",
}
# What it computes less exactly, in nats.
ROUGHER = {"apertus": 5e-3, "bloom": 2e-3}


def folders(family: str, root: Path, tokenizer: PreTrainedTokenizerFast) -> tuple[Path, Path]:
    """Two models of a family."""
    made = FAMILIES[family]
    return made.save(root / "old", tokenizer, 1), made.save(root / "new", tokenizer, 2)


def sample(backend: str, old_folder: Path, new_folder: Path) -> Recorded:
    """Samples, takes new weights in flight, samples on."""
    new = language(new_folder)
    driven = Driven(sampler_of(backend, old_folder))
    driven.add(*(Request(t, random_ids(9 + 5 * t, t, 50), 14, t) for t in range(3)))
    driven.step(BEFORE_SWAP)
    driven.sampler.load(publish(new.tensors().items(), 1, torch.float32))
    driven.add(Request(3, random_ids(20, 9, 50), 12, 9))
    driven.drain()
    return {ticket: (driven.requests[ticket], driven.responses[ticket]) for ticket in range(4)}


def compare(sampled: Recorded, old_folder: Path, new_folder: Path) -> Outcome:
    """The recorded distributions against those of plain transformers."""
    old, new = plain(old_folder), plain(new_folder)
    across, before = 0.0, 0.0
    for ticket in range(3):
        request, response = sampled[ticket]
        expected = logprobs_across_swap(
            old, new, request.prompt_ids, response.ids, BEFORE_SWAP, VOCABULARY, 1.0
        )
        difference = (response.logprobs - expected).abs().amax(-1)
        before = max(before, difference[:BEFORE_SWAP].max().item())
        across = max(across, difference[BEFORE_SWAP:].max().item())
    request, response = sampled[3]
    expected = logprobs_of(new, request.prompt_ids, response.ids, VOCABULARY, 1.0)
    return Outcome(before, across, (response.logprobs - expected).abs().max().item())


def plain(folder: Path) -> Any:
    """The model as transformers loads it, with its slowest and most complete attention."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def apart(work: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function in a process of its own: vLLM's engine is global to one."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read when the process starts
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def rehearse(backend: str, folder: Path) -> str:
    """What is said of this sampler before a run; nothing if it is right."""
    model = language(folder)
    canary = model.canary(1.0, 32, torch.float32)
    try:
        worker = RolloutWorker(sampler_of(backend, folder), str, Sampled(), 32, seed=0)
        worker.rehearse(publish(model.tensors().items(), 0, torch.float32, canary))
    except Exception as error:  # vLLM's own are of many types, and not all can leave the process
        return f"{type(error).__name__}: {error}"
    return ""


def sampler_of(backend: str, folder: Path) -> Any:
    model = language(folder)
    if backend == "hf":
        return HFSampler(model.model, model.vocabulary, [], 1.0, slots=3)
    os.environ |= vllm_environment(sorted(os.sched_getaffinity(0))[:1], memory_gib=0.05)
    from engine.backends.vllm import VLLMSampler

    return VLLMSampler(
        str(folder), model.vocabulary, [], 1.0, 3, 128, 0.05, torch.float32, False, 0
    )
