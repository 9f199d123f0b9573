"""Checkpoints are whole or not there."""

import json
from pathlib import Path

import pytest

from engine.checkpoint import MANIFEST, Checkpoints, CorruptCheckpointError, Position


def written(checkpoints: Checkpoints, version: int, text: str = "weights") -> Path:
    """A draft with all that a learner writes."""
    draft = checkpoints.new(version)
    (draft / "model").mkdir()
    (draft / "model" / "model.safetensors").write_text(text)
    (draft / "model" / "merges").write_text("a file without a dot in its name")
    (draft / "optimizer.safetensors").write_text("moments")
    return draft


def position(version: int) -> Position:
    return Position(version, 10 * version, [(3, 0), (5, 2)])


def saved(folder: Path, *versions: int, keep: int = 10) -> Checkpoints:
    checkpoints = Checkpoints(folder, keep)
    for version in versions:
        checkpoints.commit(written(checkpoints, version), position(version))
    return checkpoints


def test_the_newest_checkpoint_comes_back_with_its_position(tmp_path):
    checkpoints = saved(tmp_path, 25, 50, 100)
    path, found = checkpoints.latest()
    assert path == tmp_path / "step-000100"
    assert found == Position(100, 1000, [(3, 0), (5, 2)])
    assert (path / "model" / "model.safetensors").read_text() == "weights"
    assert [p.name for p in checkpoints.all()] == ["step-000025", "step-000050", "step-000100"]


def test_a_checkpoint_is_found_by_another_process(tmp_path):
    saved(tmp_path, 7)
    assert Checkpoints(tmp_path, keep=2).latest()[1] == position(7)


def test_a_draft_never_counts_however_far_it_got(tmp_path):
    checkpoints = saved(tmp_path, 25)
    draft = written(checkpoints, 50)
    (draft / MANIFEST).write_text(json.dumps({"position": {}, "files": {}}))
    assert [p.name for p in checkpoints.all()] == ["step-000025"]
    assert checkpoints.latest()[1] == position(25)


def test_a_new_draft_holds_nothing_of_one_that_was_cut_short(tmp_path):
    checkpoints = Checkpoints(tmp_path / "not" / "there" / "yet", keep=2)
    left = checkpoints.new(25)
    (left / "half.safetensors").write_text("half")
    assert list(checkpoints.new(25).iterdir()) == []


def test_a_checkpoint_of_the_same_version_is_replaced(tmp_path):
    checkpoints = saved(tmp_path, 25)
    draft = written(checkpoints, 25, text="newer weights")
    path = checkpoints.commit(draft, Position(25, 1, []))
    assert (path / "model" / "model.safetensors").read_text() == "newer weights"
    assert checkpoints.latest() == (path, Position(25, 1, []))
    assert [p.name for p in tmp_path.iterdir()] == ["step-000025"]


@pytest.mark.parametrize(("keep", "left"), [(1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4])])
def test_only_the_newest_checkpoints_are_kept(tmp_path, keep, left):
    saved(tmp_path, 1, 2, 3, 4, keep=keep)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-{v:06d}" for v in left]


@pytest.mark.parametrize(
    "name", ["model/model.safetensors", "model/merges", "optimizer.safetensors"]
)
def test_a_changed_or_missing_file_is_detected_and_named(tmp_path, name):
    checkpoints = saved(tmp_path, 25)
    file = tmp_path / "step-000025" / name
    original = file.read_bytes()
    file.write_bytes(original[:-1] + b"?")
    with pytest.raises(CorruptCheckpointError, match=name):
        checkpoints.latest()
    file.write_bytes(original)
    assert checkpoints.latest()[1] == position(25)
    file.unlink()
    with pytest.raises(CorruptCheckpointError, match=name):
        checkpoints.latest()


def test_a_checkpoint_without_its_manifest_is_detected(tmp_path):
    checkpoints = saved(tmp_path, 25)
    (tmp_path / "step-000025" / MANIFEST).unlink()
    with pytest.raises(CorruptCheckpointError, match=MANIFEST):
        checkpoints.latest()
