"""Everything that can be known to be wrong before a worker starts."""

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine.config import ConfigError, RunConfig, StudentTopK, TeacherTopK, TopKTail
from engine.models import check_family, load_config, load_tokenizer, resolve, stop_ids
from engine.prompts import Prompt, read_prompts, read_sources

# Texts on which two tokenizers of one family tend to part: spaces, digits, code, scripts, emoji,
# control characters, special tokens spelled out.
PROBES = (
    "Hello, world!",
    "  two  spaces\tand a tab\r\n",
    "3.14159 + 2,718 = 1e-9",
    "def f(x):\n    return x**2  # code",
    "naïve café — “quotes” …",
    "русский текст",
    "数学は楽しい。",
    "العربية",
    "🙂👩‍👩‍👧‍👦🇪🇺",
    "<|im_start|>user\n<|im_end|>",
    "<s></s><pad><unk>",
    "\\boxed{42} \\frac{1}{2}",
    "a" * 50,
    "\x00\x7f",
)
PROBE_SECONDS = 3.0


@dataclass(frozen=True)
class Inputs:
    """A run's inputs, found and checked."""

    student: Path
    teacher: Path
    prompts: list[Prompt]
    evaluation: list[Prompt]
    vocabulary: int
    """Ids of the tokenizer."""
    skipped: int
    """Prompts left out as too long."""
    held_out: int
    """Prompts left out because they are evaluated on."""
    guards: dict[str, list[Prompt]] = field(default_factory=dict)
    """The gate's further evaluation sets."""

    @property
    def longest_prompt(self) -> int:
        return max(len(prompt.ids) for prompt in [*self.prompts, *self.evaluated])

    @property
    def evaluated(self) -> list[Prompt]:
        """The held-out prompts, and those of all guards."""
        return [*self.evaluation, *(prompt for each in self.guards.values() for prompt in each)]


def check(config: RunConfig) -> Inputs:
    """Finds and checks all that a run needs. Raises ConfigError: what is wrong, where, and what to
    do."""
    inputs = find(config)
    k_fits(config, inputs.vocabulary)
    uri = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    check_address("tracking.uri", uri)
    return inputs


def find(config: RunConfig) -> Inputs:
    """Finds and checks models and prompts."""
    student, teacher = resolve(config.student.model), resolve(config.teacher.model)
    tokenizer = load_tokenizer(student, config.student.trust_remote_code)
    teachers = load_tokenizer(teacher, config.teacher.trust_remote_code)
    same_tokenizer(tokenizer, teachers, config)
    same_end(stop_ids(student, tokenizer), stop_ids(teacher, teachers), config)
    prompts, skipped = read_sources(tokenizer, config.prompts)
    evaluation, _ = read_prompts(
        config.evaluation.path, tokenizer, config.prompts, config.evaluation.limit
    )
    guards = {
        name: read_prompts(guard.path, tokenizer, config.prompts, guard.limit)[0]
        for name, guard in config.gate.guards.items()
    }
    held_out = {p.text for each in (evaluation, *guards.values()) for p in each}
    kept = [prompt for prompt in prompts if prompt.text not in held_out]
    if not kept:
        sources = ", ".join(config.prompts.sources)
        raise ConfigError(
            f"{sources}: every prompt is also in {config.evaluation.path}; "
            "training needs prompts that are not evaluated on"
        )
    left_out = len(prompts) - len(kept)
    inputs = Inputs(student, teacher, kept, evaluation, len(tokenizer), skipped, left_out, guards)
    for name, folder in (("student", student), ("teacher", teacher)):
        fits(name, folder, tokenizer, config, inputs)
    return inputs


def k_fits(config: RunConfig, vocabulary: int) -> None:
    """Refuses a cache of more ids than there are."""
    cache = config.estimator.cache
    if isinstance(cache, TeacherTopK | StudentTopK | TopKTail) and cache.k > vocabulary:
        raise ConfigError(
            f"estimator.cache.k = {cache.k} is larger than the vocabulary of {vocabulary} ids; "
            'lower it, or take cache = {type = "dense"}'
        )


def check_address(name: str, uri: str) -> None:
    """Refuses an http(s) address that nobody listens on; other URIs pass."""
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:  # its text may hold a part of a password
        raise ConfigError(f"{name}: not a valid address; write http://host:port") from None
    try:
        socket.create_connection((parts.hostname or "", port), PROBE_SECONDS).close()
    except OSError as error:
        where = f"{parts.scheme}://{parts.hostname}:{port}"  # never the user and password
        raise ConfigError(
            f"{name}: nobody answers at {where} ({error}); start the server, or unset {name}"
        ) from None


def same_tokenizer(student: Any, teacher: Any, config: RunConfig) -> None:
    """Refuses tokenizers that differ in a token, or split a text differently."""
    where = f"student {config.student.model} and teacher {config.teacher.model}"
    advice = "; a teacher must share the student's tokenizer, so take one of the same family"
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    if ours != theirs:
        different = sorted({t for t, _ in set(ours.items()) ^ set(theirs.items())})
        sample = ", ".join(map(repr, different[:3]))
        raise ConfigError(
            f"{where} have different tokenizers: {len(different)} tokens differ, "
            f"as {sample}{advice}"
        )
    for text in PROBES:
        if student.encode(text) != teacher.encode(text):
            raise ConfigError(f"{where} have tokenizers that split {text!r} differently{advice}")


def same_end(ours: list[int], theirs: list[int], config: RunConfig) -> None:
    """Refuses a teacher that ends responses with an id that doesn't stop the student."""
    if not set(theirs) <= set(ours):
        raise ConfigError(
            f"student {config.student.model} ends a response with ids {ours}, teacher "
            f"{config.teacher.model} with {theirs}: the student would learn to end with an id that "
            "doesn't stop it. Set eos_token_id alike in both generation_config.json files"
        )


def fits(name: str, folder: Path, tokenizer: Any, config: RunConfig, inputs: Inputs) -> None:
    """Refuses a model with fewer ids than its tokenizer, or too few positions. More ids than the
    tokenizer has are padding, and pass."""
    trusted = config.student if name == "student" else config.teacher
    model = load_config(folder, trusted.trust_remote_code)
    check_family(folder, trusted.trust_remote_code)
    if len(tokenizer) > model.vocab_size:
        raise ConfigError(
            f"{name} {folder}: the tokenizer has {len(tokenizer)} ids, the model only "
            f"{model.vocab_size}; these files don't belong together"
        )
    needed = inputs.longest_prompt + config.rollout.max_new_tokens
    positions = model.to_dict().get("max_position_embeddings")
    if positions is not None and needed > positions:
        raise ConfigError(
            f"{name} {folder}: reads at most {positions} tokens, but the longest prompt "
            f"({inputs.longest_prompt}) and rollout.max_new_tokens "
            f"({config.rollout.max_new_tokens}) make {needed}; lower one of them"
        )
