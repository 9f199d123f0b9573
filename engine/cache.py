"""The teacher cache on storage: scored batches under a digest of everything they depend on.

A key names the teacher's weights, the prompts' token ids, and every setting that changes a score;
whatever differs gives another key, so nothing stale can be read by mistake. An entry is an Arrow
file at any fsspec URL, written under a temporary name and moved into place.
"""

import hashlib
import json
import os
from typing import Any

import fsspec
import pyarrow as pa

from engine.prompts import Prompt


def key(prompts: list[Prompt], **settings: Any) -> str:
    """Digest of prompts (ids, answers, verifiers) and settings."""
    content = [[list(p.ids), p.answer, p.verifier] for p in prompts]
    text = json.dumps([content, settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class TeacherCache:
    """Entries by key in a folder at any fsspec URL."""

    def __init__(self, url: str) -> None:
        self._files, self._folder = fsspec.core.url_to_fs(url)

    def path(self, entry: str) -> str:
        return f"{self._folder}/{entry}.arrow"

    def read(self, entry: str) -> pa.RecordBatch | None:
        """The batch under this key, or None."""
        if not self._files.exists(self.path(entry)):
            return None
        with self._files.open(self.path(entry), "rb") as file:
            return pa.ipc.open_file(file.read()).get_batch(0)

    def write(self, entry: str, batch: pa.RecordBatch) -> None:
        """Stores a batch; a reader sees all of it or nothing."""
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_file(sink, batch.schema, options=options) as file:
            file.write_batch(batch)
        self._files.makedirs(self._folder, exist_ok=True)
        draft = f"{self.path(entry)}.{os.getpid()}"
        self._files.pipe_file(draft, sink.getvalue().to_pybytes())
        self._files.mv(draft, self.path(entry))
