"""The copy of a model in Megatron's format, and Megatron's checkpoints as input; for layouts see megatron_weights_cases."""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron_weights_cases import Opened, assert_equal, in_files

from rlcore.spi import ConfigError, ModelSpec, StorageError
from rlcore_megatron.checkpoints import conversion, distributed_weights
from rlcore_megatron.checkpoints.cache_directory import OWN
from rlcore_megatron.checkpoints.initial import load_initial
from rlcore_megatron.setup.config import MegatronConfig

CONVERTING = MegatronConfig(conversion_cache=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where copies are kept; not made yet."""
    monkeypatch.setenv(OWN, str(tmp_path / "kept"))
    return tmp_path / "kept"


def load(model: Opened, config: MegatronConfig = CONVERTING) -> None:
    for part in model.parts:
        for parameter in part.parameters():
            parameter.data.fill_(torch.nan)
    load_initial(model.parts, model.hf, model.spec, config, model.layout)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Counts how often the model itself is read."""
    reads = mock.Mock(wraps=conversion.load_hf)
    monkeypatch.setattr(conversion, "load_hf", reads)
    return reads


def test_the_copy_is_written_once_and_its_size_reported(
    folder: Path, directory: Path, model: Opened, reads: mock.Mock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, conversion.logger.name):
        for _ in range(3):
            load(model)
            assert_equal(model.exported(), in_files(directory))
    assert reads.call_count == 1
    (copy,) = folder.iterdir()
    size = sum(file.stat().st_size for file in copy.iterdir() if file.name != conversion.MARK)
    written, *read = [record.getMessage() for record in caplog.records if record.name == conversion.logger.name]
    assert written == f"keeping the model in Megatron's format in {copy} ({size / 2**20:.1f} MiB)"
    assert read == [f"read the weights from {copy} ({size / 2**20:.1f} MiB)"] * 2


def test_other_weights_have_another_copy(folder: Path, directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "model", copy_function=shutil.copy2)
    spec = ModelSpec(path=str(tmp_path / "model"))
    first = conversion.copy_directory(spec)
    assert first == conversion.copy_directory(spec)
    assert first.parent == folder
    file = tmp_path / "model" / "model.safetensors"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    found = {first, conversion.copy_directory(spec), conversion.copy_directory(ModelSpec(path=spec.path, dtype="bfloat16"))}
    with mock.patch.object(conversion, "version", return_value="0.0"):
        found.add(conversion.copy_directory(spec))
    assert len(found) == 4


def truncated(copy: Path) -> None:
    file = max(copy.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])


def without_metadata(copy: Path) -> None:
    (copy / ".metadata").unlink()


def unfinished(copy: Path) -> None:
    (copy / conversion.MARK).unlink()


def overwritten(copy: Path) -> None:
    """The sizes are as they were."""
    for file in copy.glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))


@pytest.mark.parametrize("damage", [truncated, without_metadata, unfinished, overwritten])
def test_a_damaged_copy_is_made_anew(
    folder: Path,
    directory: Path,
    model: Opened,
    reads: mock.Mock,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
) -> None:
    load(model)
    (copy,) = folder.iterdir()
    damage(copy)
    load(model)
    assert_equal(model.exported(), in_files(directory))
    assert f"{copy} is damaged: the model is converted anew" in caplog.text
    load(model)
    assert reads.call_count == 2
    assert list(folder.iterdir()) == [copy]


@pytest.mark.parametrize("damage", [None, truncated])
def test_the_slower_of_two_jobs_throws_its_copy_away(
    folder: Path,
    directory: Path,
    model: Opened,
    reads: mock.Mock,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None] | None,
) -> None:
    if damage is not None:
        load(model)
        damage(*folder.iterdir())
    write, written = distributed_weights.write, []

    def slowly(begun: Path, parts: Any) -> None:
        write(begun, parts)
        if not written:
            written.append(begun)
            load(model)  # the other job
            assert len(list(folder.iterdir())) == 2

    monkeypatch.setattr(distributed_weights, "write", slowly)
    load(model)
    assert len(list(folder.iterdir())) == 1
    num_reads = reads.call_count
    load(model)
    assert reads.call_count == num_reads, "the copy that is left is complete"
    assert_equal(model.exported(), in_files(directory))


def test_a_copy_that_another_job_throws_away_meanwhile_was_read(
    folder: Path, directory: Path, model: Opened, reads: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(model)
    read = distributed_weights.read

    def thrown_away(copy: Path, parts: Any) -> None:
        read(copy, parts)
        shutil.rmtree(copy)

    monkeypatch.setattr(distributed_weights, "read", thrown_away)
    load(model)
    assert reads.call_count == 1
    assert_equal(model.exported(), in_files(directory))


def test_what_an_earlier_job_left_is_removed(folder: Path, model: Opened) -> None:
    load(model)
    (copy,) = folder.iterdir()
    shutil.rmtree(copy)
    old, new = (folder / f".{copy.name}.{name}" for name in ("old", "new"))
    for begun in (old, new):
        begun.mkdir()
    os.utime(old, (0, 0))
    load(model)
    assert set(folder.iterdir()) == {copy, new}


def test_a_place_that_cannot_be_written_to(
    directory: Path, model: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(OWN, str(tmp_path / "file" / "kept"))
    with pytest.raises(ConfigError) as raised:
        load(model)
    (problem,) = raised.value.problems
    assert problem.path == OWN
    assert problem.found.startswith(str(tmp_path / "file" / "kept"))


def num_elements(model: Opened) -> int:
    return sum(parameter.numel() for part in model.parts for parameter in part.parameters())


def test_too_little_room(folder: Path, model: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    monkeypatch.setattr(conversion, "ITEM_BYTES", {"float32": 2**21 / num_elements(model)})
    with pytest.raises(ConfigError) as raised:
        load(model)
    (problem,) = raised.value.problems
    assert (problem.path, problem.found) == (OWN, f"{folder} with 1.0 MiB free")
    assert problem.expected.startswith("2.0 MiB")
    assert not folder.exists()


def test_a_disk_that_fills_up_leaves_nothing_behind(folder: Path, model: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(begun: Path, parts: Any) -> None:
        (begun / "some").write_text("thing")
        raise StorageError("no space")

    monkeypatch.setattr(distributed_weights, "write", full)
    with pytest.raises(StorageError):
        load(model)
    assert list(folder.iterdir()) == []


def test_storage_that_nodes_do_not_share(folder: Path, model: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    exists = Path.exists
    monkeypatch.setattr(conversion, "VISIBLE_WITHIN_S", 0.05)
    monkeypatch.setattr(Path, "exists", lambda path: path.parent != folder and exists(path))
    with pytest.raises(ConfigError) as raised:
        load(model)
    (problem,) = raised.value.problems
    assert (problem.path, problem.expected) == (str(folder), "storage that all nodes share")
