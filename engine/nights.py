"""The nights of a registered model: one row each, and the prompts that it has trained on.

    <directory>/nights/<model>.parquet   the rows; the truth about which prompts were trained on
    <directory>/nights/<model>.lock      held while a night runs; its owner's death frees it

A night's row is written when the night has ended, under a temporary name that is then moved into
place: a night that dies leaves no trace here, and the next one takes its prompts. A prompt is known
by a digest of its text, so that sources may grow, move and overlap.
"""

import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from engine.prompts import Prompt

DIGEST_BYTES = 16
# Names that are part of a path or of a URL get other characters.
TRAINED = "trained"

NIGHT = pa.schema(
    [
        ("night", pa.string()),  # name of its run, by the time of its start
        ("started", pa.timestamp("s", tz="UTC")),
        ("decision", pa.string()),  # promoted, rejected, no new prompts, too few prompts
        ("reasons", pa.string()),
        ("champion", pa.string()),  # version that the night started from; null for the student
        ("candidate", pa.string()),  # version that it registered
        ("new_prompts", pa.int64()),  # that were there for it
        ("prompts", pa.int64()),  # of them, trained on
        ("steps", pa.int64()),
        ("tokens", pa.int64()),  # trained on
        ("accuracy_champion", pa.float64()),
        ("accuracy_candidate", pa.float64()),
        ("accuracy_gain_at_least", pa.float64()),
        ("kl_champion", pa.float64()),
        ("kl_candidate", pa.float64()),
        ("kl_change_at_most", pa.float64()),
        ("seconds", pa.float64()),
        ("cpu_seconds", pa.float64()),
        ("mlflow_run", pa.string()),
        (TRAINED, pa.list_(pa.binary(DIGEST_BYTES))),
    ]
)


class NightRunsError(RuntimeError):
    """Another night of this model is under way."""


def digest(prompt: Prompt) -> bytes:
    """What a prompt is known by."""
    return hashlib.sha256(prompt.text.encode()).digest()[:DIGEST_BYTES]


def digest_of(prompts: list[Prompt]) -> str:
    """One digest of all these prompts, in whatever order."""
    return hashlib.sha256(b"".join(sorted(map(digest, prompts)))).hexdigest()[:24]


class Nights:
    """The table of one registered model's nights."""

    def __init__(self, directory: Path, model_name: str) -> None:
        self._path = directory / "nights" / f"{model_name}.parquet"
        self._path.parent.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Held for a night. Raises NightRunsError where another one holds it."""
        with self._path.with_suffix(".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise NightRunsError(f"another night of {self._path.stem} is under way") from None
            yield

    def table(self) -> pa.Table:
        """All nights, oldest first."""
        return (
            pq.read_table(self._path, schema=NIGHT) if self._path.exists() else NIGHT.empty_table()
        )

    def fresh(self, prompts: list[Prompt]) -> list[Prompt]:
        """Those that no night has trained on, each once."""
        seen = set(self.table()[TRAINED].combine_chunks().flatten().to_pylist())
        kept: dict[bytes, Prompt] = {}
        for prompt in prompts:
            name = digest(prompt)
            if name not in seen:
                kept.setdefault(name, prompt)
        return list(kept.values())

    def add(self, row: dict[str, Any], trained: list[Prompt]) -> None:
        """Records a night that has ended."""
        row = row | {TRAINED: sorted({digest(prompt) for prompt in trained})}
        draft = self._path.with_suffix(".draft")
        pq.write_table(pa.concat_tables([self.table(), _one(row)]), draft)
        draft.replace(self._path)

    def export(self, url: str) -> None:
        """Writes the table, without digests, as Parquet and CSV into a folder at any fsspec URL."""
        table = self.table().drop_columns([TRAINED])
        files, folder = fsspec.core.url_to_fs(url)
        files.makedirs(folder, exist_ok=True)
        parquet, text = pa.BufferOutputStream(), pa.BufferOutputStream()
        pq.write_table(table, parquet)
        pa.csv.write_csv(table, text)
        for sink, ending in ((parquet, "parquet"), (text, "csv")):
            name = f"{folder}/{self._path.stem}.{ending}"
            files.pipe_file(f"{name}.draft", sink.getvalue().to_pybytes())
            files.mv(f"{name}.draft", name)


def _one(row: dict[str, Any]) -> pa.Table:
    if unknown := sorted(set(row) - set(NIGHT.names)):
        raise KeyError(f"a night has no column {', '.join(unknown)}")
    return pa.Table.from_pylist([row], NIGHT)
