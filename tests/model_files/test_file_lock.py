"""Locks of files that several processes write."""

import errno
import fcntl
import threading
from pathlib import Path

import pytest

from rlcore_model_files.file_lock import file_lock


def test_of_two_that_name_one_file_the_second_waits(tmp_path: Path) -> None:
    waits, order = threading.Event(), list[str]()

    def second() -> None:
        with file_lock(tmp_path / "lock", waits.set):
            order.append("second")

    thread = threading.Thread(target=second)
    with file_lock(tmp_path / "lock"):
        thread.start()
        assert waits.wait(300)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_where_nothing_can_be_locked_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with file_lock(tmp_path / "file" / "lock"), file_lock(tmp_path / "file" / "lock"):
        pass

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with file_lock(tmp_path / "lock"), file_lock(tmp_path / "lock"):
        pass
