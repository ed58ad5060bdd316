"""A checkpoint is whole or not there: manifest, rename, retention, damage, a full disk."""

import errno
import json
import os
from pathlib import Path

import pytest

from rlcore.run.storage import checkpoint
from rlcore.run.storage.checkpoint import (
    LoopState,
    begin_checkpoint,
    find_damage,
    list_checkpoints,
    newest_checkpoint,
    read_loop_state,
    require_intact,
)
from rlcore.spi import CheckpointError, StorageError


def state(step: int) -> LoopState:
    return LoopState(step=step, weight_version=2 * step, model="a" * 64, trainer="fake")


def write_weights(directory: Path) -> None:
    (directory / "trainer").mkdir()
    (directory / "trainer" / "weights").write_bytes(bytes(range(256)) * 16)


def save(root: Path, step: int, keep: int = 10) -> Path:
    return begin_checkpoint(root, state(step), write_weights, keep=keep)()


def test_saved_state_is_read_back_and_nothing_temporary_remains(tmp_path: Path) -> None:
    saved = save(tmp_path, 3)
    assert saved.name == "step-000003"
    assert read_loop_state(saved) == state(3)
    assert find_damage(saved) is None
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]


def test_a_file_that_is_replaced_between_two_checks_is_read_again(tmp_path: Path) -> None:
    """By a copy that keeps size and time of modification, as rsync and cp -p do."""
    saved = save(tmp_path, 1)
    assert find_damage(saved) is None
    weights = saved / "trainer" / "weights"
    before = weights.stat()
    weights.write_bytes(bytes(before.st_size))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "another content" in (find_damage(saved) or "")


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 10, 11):
        save(tmp_path, step, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000010", "step-000011"]


def test_a_write_that_dies_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def die(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise RuntimeError("the process dies here")

    with pytest.raises(RuntimeError):
        begin_checkpoint(tmp_path, state(2), die, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


@pytest.mark.parametrize("folder", [False, True])
def test_a_checkpoint_without_manifest_is_noted_and_the_one_before_it_taken(tmp_path: Path, folder: bool) -> None:
    save(tmp_path, 1)
    manifest = save(tmp_path, 2) / "manifest.json"
    manifest.unlink()
    if folder:
        manifest.mkdir()
    notes: list[str] = []
    assert newest_checkpoint(tmp_path, notes.append) == tmp_path / "step-000001"
    (note,) = notes
    assert "step-000002" in note
    assert "manifest.json" in note


def test_a_full_disk_is_named_and_loses_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def full(directory: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(directory))

    with pytest.raises(StorageError, match=r"No space left.*MiB free|MiB free.*No space left"):
        begin_checkpoint(tmp_path, state(2), full, keep=1)
    assert newest_checkpoint(tmp_path, pytest.fail) == tmp_path / "step-000001"


def test_a_checkpoint_counts_once_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are written first; where the disk then refuses them, nothing of it stays."""
    save(tmp_path, 1)
    complete = begin_checkpoint(tmp_path, state(2), write_weights, keep=1)
    assert list_checkpoints(tmp_path) == [tmp_path / "step-000001"]
    assert complete() == tmp_path / "step-000002"
    assert list_checkpoints(tmp_path) == [tmp_path / "step-000002"]

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    complete = begin_checkpoint(tmp_path, state(3), write_weights, keep=1)
    monkeypatch.setattr(checkpoint, "sync", full)
    with pytest.raises(StorageError):
        complete()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
def test_damage_is_noticed_and_the_checkpoint_before_it_taken(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1)
    weights = save(tmp_path, 2) / "trainer" / "weights"
    content = bytearray(weights.read_bytes())
    if damage == "truncated":
        weights.write_bytes(content[:-1])
    elif damage == "changed":
        content[100] ^= 1
        weights.write_bytes(content)
    else:
        weights.unlink()
    notes: list[str] = []
    assert newest_checkpoint(tmp_path, notes.append) == tmp_path / "step-000001"
    assert len(notes) == 1
    assert "trainer/weights" in notes[0]


def test_a_damaged_checkpoint_that_was_named_asks_for_an_intact_one(tmp_path: Path) -> None:
    saved = save(tmp_path, 3)
    assert require_intact(saved) == saved
    (saved / "loop.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-000003 .*loop\.json.*Name an intact"):
        require_intact(saved)
    with pytest.raises(CheckpointError, match=r"step-3 .*Did you mean .*/step-000003\?"):
        require_intact(saved.with_name("step-3"))


def test_where_all_are_damaged_the_error_lists_them(tmp_path: Path) -> None:
    for step in (1, 2):
        (save(tmp_path, step) / "loop.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"(?s)step-000002.*loop\.json.*step-000001"):
        newest_checkpoint(tmp_path, lambda _: None)


def test_a_format_of_the_future_is_refused(tmp_path: Path) -> None:
    manifest = save(tmp_path, 1) / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 2}))
    with pytest.raises(CheckpointError, match="found format 2"):
        newest_checkpoint(tmp_path, lambda _: None)


@pytest.mark.parametrize(
    "content",
    [
        b"\xff",
        b"[1, 2]",
        b"[" * 100_000,
        b"null",
        b"{}",
        b'{"format": 1}',
        b'{"format": 1, "files": ["loop.json"]}',
        b'{"format": 1, "files": {}}',
        b'{"format": 1, "files": {"loop.json": {"bytes": 3}}}',
        b'{"format": 1, "files": {"loop.json": 7}}',
    ],
)
def test_a_damaged_manifest_is_noted_and_the_checkpoint_before_it_taken(tmp_path: Path, content: bytes) -> None:
    save(tmp_path, 1)
    (save(tmp_path, 2) / "manifest.json").write_bytes(content)
    notes: list[str] = []
    assert newest_checkpoint(tmp_path, notes.append) == tmp_path / "step-000001"
    (note,) = notes
    assert note.startswith("checkpoint step-000002 is damaged and passed over: ")


def test_copies_under_other_names_are_no_checkpoints_and_the_newest_is_by_number(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000):
        save(tmp_path, step)
    for name in ("step-2000000.bak", "step-old", "step-"):
        (tmp_path / "step-999999").rename(tmp_path / name)
        save(tmp_path, 999_999)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-999999", "step-1000000"]
