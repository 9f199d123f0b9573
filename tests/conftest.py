"""Fixtures for all tests: the smallest models that are whole Hugging Face folders.

    tiny_tokenizer   one id for each character; ChatML
    tiny_student     folder of a Qwen3 of one layer and that tokenizer
    tiny_teacher     the same shape, other weights

They are built once for a session and shared: copy a folder (`shutil.copytree`) before changing it.
Nothing here or in any test reaches for the network.
"""

import os
from pathlib import Path

# Read when transformers and the hub are imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import hypothesis
import pytest
import ray
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

# The same examples in every run, however slow the machine: a failure comes from a change.
hypothesis.settings.register_profile("opdflow", deadline=None, derandomize=True)
hypothesis.settings.load_profile("opdflow")
torch.set_num_threads(1)  # on tensors this small, threads only wait for each other

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 \n.,:;?!+-*/=()\\{}"
# Rows of the embedding that no token has, as real models have them to fill up a multiple.
PADDED_IDS = 6
POSITIONS = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}!\n{% endif %}{% endif %}"
)


def build_tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """A tokenizer of `len(SPECIAL) + len(characters)` ids; other characters are `<unk>`.

    Other characters, or the same in another order, make the tokenizer of another family."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *characters])}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    letters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=letters,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def save_model(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int) -> Path:
    """Writes a one-layer Qwen3 with seeded weights and this tokenizer as a Hugging Face folder."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=len(tokenizer) + PADDED_IDS,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=32,
                max_position_embeddings=POSITIONS,
                tie_word_embeddings=True,
                initializer_range=0.3,  # enough for distributions that aren't flat
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                dtype="float32",
            )
        )
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,  # written out, because transformers would otherwise keep 50 tokens
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A character tokenizer; ends responses with `<|im_end|>`, pads with `<|endoftext|>`."""
    return build_tokenizer()


@pytest.fixture(scope="session")
def tiny_student(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast
) -> Path:
    """Folder of the student. Its embedding has PADDED_IDS rows more than the tokenizer has ids."""
    return save_model(tmp_path_factory.mktemp("models") / "student", tiny_tokenizer, seed=1)


@pytest.fixture(scope="session")
def tiny_teacher(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast
) -> Path:
    """Folder of the teacher: the student's shape and tokenizer, other weights."""
    return save_model(tmp_path_factory.mktemp("models") / "teacher", tiny_tokenizer, seed=2)


@pytest.fixture(scope="session")
def ray_session():
    """One Ray for all tests, started in another folder than the runs'."""
    ray.init(
        address="local",
        num_cpus=3,  # as many processes as a run has workers
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield
    ray.shutdown()
