"""Prompts: read from any fsspec URL, turned into token ids once, and streamed in a seeded order.

The stream is a function of (seed, position): epoch e visits the prompts in the e-th seeded
permutation, so a cursor and a list of tickets to try again are all the state there is.
"""

import json
from dataclasses import dataclass
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jinja2 import TemplateError

from engine.config import ConfigError, PromptsConfig
from engine.schema import PROMPT, ragged, validate
from engine.verifiers import VERIFIERS


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready to be generated from."""

    id: str
    text: str
    """As the model sees it, chat template applied."""
    ids: tuple[int, ...]
    answer: str | None
    verifier: str


def read_rows(path: str, growing: bool = False) -> list[dict[str, Any]]:
    """Rows of a JSONL or Parquet file at any fsspec URL; of a growing one, without a last line that
    has no end yet. Raises ConfigError naming file and row."""
    try:
        with fsspec.open(path, "rb") as file:
            data = file.read()
        parquet = path.endswith(".parquet")
        rows: list[dict[str, Any]] = _parquet(data) if parquet else []
        # Not splitlines(): JSON strings may hold U+2028 and other things that it takes for an end.
        whole = data[: data.rfind(b"\n") + 1] if growing else data
        lines = [] if parquet else whole.decode().split("\n")
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(f"{path}: no such prompt file") from None
    except (ImportError, OSError, ValueError) as error:
        # An unknown protocol, a package that serves it and is missing, no right to read, not UTF-8,
        # not Parquet: the error says which.
        raise ConfigError(f"{path}: can't be read: {error}") from None
    rows += [
        _json(line, f"{path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not rows:
        raise ConfigError(f"{path}: the prompt file is empty")
    return rows


def read_sources(tokenizer: Any, config: PromptsConfig) -> tuple[list[Prompt], int]:
    """The prompts of all sources, in their order, and how many were skipped as too long."""
    growing = config.growing
    parts = [read_prompts(path, tokenizer, config, growing=growing) for path in config.sources]
    return [prompt for prompts, _ in parts for prompt in prompts], sum(n for _, n in parts)


def read_prompts(
    path: str,
    tokenizer: Any,
    config: PromptsConfig,
    limit: int | None = None,
    growing: bool = False,
) -> tuple[list[Prompt], int]:
    """The prompts of a file, and how many were skipped as too long.

    Raises ConfigError that names the file and the row."""
    prompts: list[Prompt] = []
    skipped = 0
    for number, row in enumerate(read_rows(path, growing)[:limit], 1):
        prompt = _prompt(row, f"{path}, row {number}", tokenizer, config.template)
        if len(prompt.ids) > config.max_tokens:
            if config.too_long == "refuse":
                raise ConfigError(
                    f"{path}, row {number} ({prompt.id}): {len(prompt.ids)} tokens, more than "
                    f'prompts.max_tokens = {config.max_tokens}; raise it, or set too_long = "skip"'
                )
            skipped += 1
        else:
            prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{path}: no prompt is left after skipping {skipped} that are too long")
    return prompts, skipped


def _parquet(data: bytes) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(pa.BufferReader(data)).to_pylist()
    return rows


def _json(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a row is an object with `text` or `messages`")
    return row


def _prompt(row: dict[str, Any], where: str, tokenizer: Any, template: dict[str, Any]) -> Prompt:
    text: Any = row.get("text")
    messages = row.get("messages")
    if (text is None) == (messages is None):
        raise ConfigError(f"{where}: give either `text` or `messages`, and has {sorted(row)}")
    if messages is not None:
        if not tokenizer.chat_template:
            raise ConfigError(f"{where}: has `messages`, but the tokenizer has no chat template")
        try:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **template
            )
        except (TemplateError, TypeError, ValueError) as error:  # templates refuse some messages
            raise ConfigError(f"{where}: the chat template fails on it: {error}") from None
    if not isinstance(text, str):
        raise ConfigError(f"{where}: `text` is a string, not {text!r}")
    # A chat template writes its special tokens itself; plain text takes the tokenizer's.
    ids = tuple(tokenizer.encode(text, add_special_tokens=messages is None))
    if not ids:
        raise ConfigError(f"{where}: the prompt is empty")
    answer = row.get("answer")
    verifier = row.get("verifier") or "exact"
    if verifier not in VERIFIERS:
        raise ConfigError(f"{where}: unknown verifier {verifier!r}; there are {sorted(VERIFIERS)}")
    identity = row.get("id")
    return Prompt(
        where if identity is None else str(identity),
        text,
        ids,
        None if answer is None else str(answer),
        verifier,
    )


def to_batch(
    prompts: list[Prompt], tickets: list[int] | range, attempts: list[int]
) -> pa.RecordBatch:
    """A PROMPT batch of these prompts."""
    flat = np.fromiter((i for prompt in prompts for i in prompt.ids), np.int32)
    columns = [
        pa.array(tickets, pa.int64()),
        pa.array(attempts, pa.int32()),
        pa.array([prompt.id for prompt in prompts], pa.string()),
        ragged(flat, [len(prompt.ids) for prompt in prompts]),
        pa.array([prompt.answer for prompt in prompts], pa.string()),
        pa.array([prompt.verifier for prompt in prompts], pa.string()),
    ]
    return validate(pa.RecordBatch.from_arrays(columns, schema=PROMPT), PROMPT)


class PromptStream:
    """An endless, seeded, resumable stream of prompts."""

    def __init__(self, prompts: list[Prompt], seed: int) -> None:
        self._prompts = prompts
        self._seed = seed
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))
        self.cursor = 0
        """The next ticket that was never handed out."""
        self._again: list[tuple[int, int]] = []

    def take(self, count: int) -> pa.RecordBatch:
        """The next `count` prompts as a PROMPT batch: those queued again first."""
        again, self._again = self._again[:count], self._again[count:]
        fresh = [(self.cursor + i, 0) for i in range(count - len(again))]
        self.cursor += len(fresh)
        pairs = again + fresh
        prompts = [self.prompt(ticket) for ticket, _ in pairs]
        return to_batch(prompts, [ticket for ticket, _ in pairs], [n for _, n in pairs])

    def queue_again(self, ticket: int, attempt: int) -> None:
        """Puts a ticket back in front of the stream, as its `attempt`-th try."""
        self._again.append((ticket, attempt))

    @property
    def waiting(self) -> list[tuple[int, int]]:
        """(ticket, attempt) pairs that were queued again and not yet handed out."""
        return list(self._again)

    def restore(self, cursor: int, waiting: list[tuple[int, int]]) -> None:
        """Goes back to a saved position."""
        self.cursor, self._again = cursor, list(waiting)

    def prompt(self, ticket: int) -> Prompt:
        """The prompt of a ticket, handed out or not."""
        epoch, position = divmod(ticket, len(self._prompts))
        if self._order[0] != epoch:
            rng = np.random.default_rng([self._seed, epoch])
            self._order = (epoch, rng.permutation(len(self._prompts)))
        return self._prompts[int(self._order[1][position])]
