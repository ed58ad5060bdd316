"""Writing to disk: whole files or the old ones, and errors that say what to do."""

import errno
from pathlib import Path

import pytest

from rlcore import files
from rlcore.files import storage_errors, write_atomically
from rlcore.spi import StorageError


@pytest.mark.parametrize("there", [True, False])
def test_an_error_of_the_system_says_what_where_and_how_much_room_there_is(tmp_path: Path, there: bool) -> None:
    directory = tmp_path if there else tmp_path / "gone"
    cause = OSError(errno.ENOSPC, "No space left on device")
    message = r"the export could not be written to .* \(\d+ MiB free\): No space left"
    with pytest.raises(StorageError, match=message) as raised, storage_errors("the export", directory):
        raise cause
    assert str(directory) in str(raised.value)
    assert raised.value.__cause__ is cause


def test_where_nothing_is_known_of_the_disk_the_error_is_said_all_the_same(tmp_path: Path) -> None:
    message = r"the export could not be written to .*below: no words\. Make room"
    with pytest.raises(StorageError, match=message), storage_errors("the export", tmp_path / "gone" / "below"):
        raise OSError("no words")


def test_what_is_no_error_of_writing_passes(tmp_path: Path) -> None:
    with pytest.raises(KeyError), storage_errors("the export", tmp_path):
        raise KeyError


def test_a_file_is_replaced_whole_and_nothing_else_remains(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text in ("one", "two, ä"):
        write_atomically(path, text)
        assert path.read_text() == text
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, "old")

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(StorageError, match=r"a\.json .* written"):
        write_atomically(path, "new")
    assert path.read_text() == "old"


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "Make room"),
        (errno.EROFS, "Make it writable"),
        (errno.EFBIG, "Raise the limit on the size of files"),
        (errno.ENOENT, "Make that folder"),
    ],
)
def test_the_remedy_is_for_what_went_wrong(tmp_path: Path, number: int, remedy: str) -> None:
    with pytest.raises(StorageError, match=rf"\. {remedy}.*, or point run\.directory"), storage_errors("a", tmp_path):
        raise OSError(number, "words")
