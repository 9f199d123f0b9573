"""Language models by Hugging Face folder or hub id, by the same code for student and teacher."""

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from engine.backends.hf import HFSampler
from engine.batch import Sequences
from engine.canary import TOLERANCE, Canary
from engine.config import ConfigError
from engine.head import Head, TeacherHead, log_softmax
from engine.names import in_folder
from engine.weights import Weights, publish

# Weights as safetensors only: a pickle from a model's folder would run its author's code.
FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py"]

# Layers that keep keys and values, and nothing else.
ATTENTION = {"full_attention", "sliding_attention"}
# A head computed apart from its model may differ from the model's own logits by rounding only.
HEAD_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}


def resolve(model: str) -> Path:
    """The folder of a model; downloads a hub id. Raises ConfigError that names the model."""
    folder = Path(model).expanduser().absolute()  # workers may run in another directory
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{model}: the folder has no config.json, so it is not a model's")
        return folder
    if model.count("/") > 1 or model.startswith((".", "~", "/")):
        raise ConfigError(f"{model}: no such model folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"{model}: neither a folder here nor a model that the hub gives us ({error})"
        ) from None


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model's folder."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: the tokenizer can't be loaded: {error}") from None
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # what transformers makes of no files
        raise ConfigError(f"{folder}: the tokenizer's files are missing")
    return tokenizer


def load_config(folder: Path, trust_remote_code: bool = False) -> Any:
    """The text part of a model's configuration."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: the model's config.json can't be used: {error}") from None
    return config.get_text_config(decoder=True)


def check_family(folder: Path, trust_remote_code: bool = False) -> None:
    """Raises ConfigError with the reason if models of this family can't be used. Reads no weights.

    Keys and values must be all that is kept of a text: samplers put them together from requests of
    different lengths, and go on with them after a swap of weights."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if config.is_encoder_decoder:
        raise ConfigError(_refusal(folder, config, "they have an encoder"))
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except ValueError:
        raise ConfigError(_refusal(folder, config, "they aren't causal language models")) from None
    layers = config.get_text_config(decoder=True).to_dict().get("layer_types") or ()
    others = sorted(set(layers) - ATTENTION) or ["recurrent"] * model._is_stateful
    if others:
        reason = f"their {' and '.join(others)} layers keep more of a text than keys and values"
        raise ConfigError(_refusal(folder, config, reason))


def _refusal(folder: Path, config: Any, reason: str) -> str:
    return (
        f"{folder}: models of the family {config.model_type} can't be used: {reason}; take one of "
        "another family, README.md lists those that are tested"
    )


def stop_ids(folder: Path, tokenizer: Any) -> list[int]:
    """Ids that end a response: the tokenizer's and the generation configuration's, which may be a
    list."""
    from transformers import GenerationConfig

    ids = {tokenizer.eos_token_id}
    if (folder / "generation_config.json").is_file():
        named = GenerationConfig.from_pretrained(folder).eos_token_id
        ids.update(named if isinstance(named, list) else [named])
    return sorted(i for i in ids if i is not None)


def digest(folder: Path) -> str:
    """Content digest of a model's weights and configuration."""
    total = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), folder / "config.json"]):
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()[:16]


def pick_device() -> torch.device:
    """The process's GPU if it has one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the device is made for it."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def finish_of(config: Any) -> Callable[[Tensor], Tensor]:
    """What some families of models do to logits on top of the projection."""
    values = config.to_dict()
    softcap = values.get("final_logit_softcapping")
    multiplier = (values.get("logit_scale") or 1.0) / (values.get("logits_scaling") or 1.0)

    def finish(logits: Tensor) -> Tensor:
        if multiplier != 1:
            logits = logits * multiplier
        return softcap * torch.tanh(logits / softcap) if softcap else logits

    return finish


def teacher_head(
    folder: Path,
    weights: Weights,
    vocabulary: int,
    temperature: float,
    device: torch.device,
    trust_remote_code: bool = False,
) -> TeacherHead:
    """The head of the model in a folder, of weights that `Language.head_weights` gave."""
    tensors = {name: tensor.to(device, copy=True) for name, tensor in weights.tensors()}
    projection = torch.nn.Linear(1, 1, bias="bias" in tensors, device="meta")
    for name, tensor in tensors.items():
        setattr(projection, name, torch.nn.Parameter(tensor))
    finish = finish_of(load_config(folder, trust_remote_code))
    return TeacherHead(Head(projection, finish), vocabulary, temperature)


def attention_of(config: Any) -> str | None:
    """The attention to ask transformers for; None is its own choice. That one, torch's, leaves out
    the soft cap of attention scores without a word."""
    return "eager" if config.to_dict().get("attn_logit_softcapping") else None


class Language:
    """A causal language model with its tokenizer, taken apart into body and head."""

    def __init__(
        self,
        folder: Path,
        weights_dtype: torch.dtype,
        device: torch.device,
        trust_remote_code: bool = False,
    ) -> None:
        self.folder = folder
        self.device = device
        self.tokenizer = load_tokenizer(folder, trust_remote_code)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=weights_dtype,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            attn_implementation=attention_of(load_config(folder, trust_remote_code)),
        ).to(device)
        config = self.model.config.get_text_config(decoder=True)
        self.vocabulary = min(len(self.tokenizer), config.vocab_size)
        self.head = Head(self.model.get_output_embeddings(), finish_of(config))
        self.stop_ids = stop_ids(folder, self.tokenizer)
        self._check_head()

    @cached_property
    def digest(self) -> str:
        return digest(self.folder)

    def hidden(self, sequences: Sequences) -> Tensor:
        """[n, D] the states that predict each response token, see `Sequences.sources`."""
        output = self.model.base_model(
            input_ids=sequences.input_ids,
            attention_mask=sequences.attention_mask,
            use_cache=False,
        )
        states = output.last_hidden_state
        return states.reshape(-1, states.shape[-1])[sequences.sources]

    def logprobs(self, hidden: Tensor, temperature: float) -> Tensor:
        """[n, V] log-softmax over the tokenizer's ids."""
        return log_softmax(self.head(hidden), self.vocabulary, temperature)

    def head_weights(self) -> Weights:
        """The projection's weight and bias, in their type, for `teacher_head`."""
        projection = self.head.projection
        return publish(projection.named_parameters(), 0, projection.weight.dtype)

    @torch.no_grad()
    def canary(self, temperature: float, length: int, dtype: torch.dtype) -> Canary:
        """What this model, computed in this type, says after a fixed prompt of so many tokens."""
        ids = np.random.default_rng(0).integers(self.vocabulary, size=length)
        inputs = torch.from_numpy(ids)[None].to(self.device)
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            states = self.model.base_model(input_ids=inputs, use_cache=False).last_hidden_state
            logprobs = self.logprobs(states[0, -1:], temperature)[0]
        family = f"{self.model.config.model_type} ({type(self.model).__name__})"
        return Canary(family, ids.tolist(), logprobs.cpu().numpy(), TOLERANCE[dtype])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a response, for the verifier; it is never encoded again."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def sampler(self, temperature: float, slots: int) -> HFSampler:
        """A reference sampler of this model."""
        return HFSampler(self.model, self.vocabulary, self.stop_ids, temperature, slots)

    def save(self, folder: Path) -> None:
        """Writes an ordinary Hugging Face folder."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and saved buffers by their names in the folder, tied ones once."""
        return in_folder(self.model)

    @torch.inference_mode()
    def _check_head(self) -> None:
        """Refuses a model whose logits are more than its head applied to its body's output."""
        ids = torch.arange(8, device=self.device)[None] % self.vocabulary
        whole = self.model(input_ids=ids).logits.float()
        states = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        difference = (self.head(states).float() - whole).abs().max().item()
        scale = max(1.0, whole.abs().max().item())
        if not difference <= HEAD_TOLERANCE[self.model.dtype] * scale:
            raise ConfigError(
                f"{self.folder}: {type(self.model).__name__} computes its logits in a way that we "
                f"don't know (they differ by {difference:.3g}); please report this model"
            )
