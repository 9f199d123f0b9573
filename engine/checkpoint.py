"""Checkpoints: one folder for each segment, whole or not there.

    <run>/checkpoints/step-000025/
        model/                  ordinary Hugging Face folder
        optimizer.safetensors
        buffer.arrow            scored rollouts that wait for the learner
        manifest.json           version, position in the stream, checksums; written last

A checkpoint is written under a temporary name, checksummed, and renamed. What was in generation or
at the teacher is not saved but queued again: its tickets are in the manifest.
"""

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Position:
    """Where a run is."""

    version: int
    cursor: int
    """Of the stream of prompts."""
    waiting: list[tuple[int, int]]
    """(ticket, attempt) pairs to be generated again."""


class CorruptCheckpointError(RuntimeError):
    """A checkpoint's files don't match its manifest."""


class Checkpoints:
    """The checkpoints of a run, newest last."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self._keep = keep

    def new(self, version: int) -> Path:
        """An empty folder to write the next checkpoint into."""
        draft = self.folder / f".step-{version:06d}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        return draft

    def commit(self, draft: Path, position: Position) -> Path:
        """Seals a written draft under its final name, and deletes checkpoints beyond `keep`."""
        written = sorted(path for path in draft.rglob("*") if path.is_file())
        files = {str(path.relative_to(draft)): _sha256(path) for path in written}
        manifest = {"position": asdict(position), "files": files}
        (draft / MANIFEST).write_text(json.dumps(manifest, indent=1))
        final = self.folder / f"step-{position.version:06d}"
        shutil.rmtree(final, ignore_errors=True)
        draft.rename(final)
        for old in self.all()[: -self._keep]:
            shutil.rmtree(old)
        return final

    def all(self) -> list[Path]:
        """Sealed checkpoints, oldest first."""
        return sorted(self.folder.glob("step-*"))

    def latest(self) -> tuple[Path, Position]:
        """The newest checkpoint, its files checked."""
        path = self.all()[-1]
        if not (path / MANIFEST).is_file():
            raise CorruptCheckpointError(f"{path} has no {MANIFEST}")
        manifest = json.loads((path / MANIFEST).read_text())
        for name, expected in manifest["files"].items():
            if not (path / name).is_file() or _sha256(path / name) != expected:
                raise CorruptCheckpointError(f"{path / name} doesn't match the manifest")
        saved = manifest["position"]
        waiting = [(ticket, attempt) for ticket, attempt in saved["waiting"]]
        return path, Position(saved["version"], saved["cursor"], waiting)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
