"""A lock of several processes that write the same files."""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def file_lock(lock: Path, on_wait: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Run the block in one process, and thread, at a time of those that name this file, which stays; `on_wait` is called where
    another is in it. Where the file cannot be made or locked, the block runs at once. It is not to be nested."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        opened = _opened(lock)
    except OSError:  # such as a folder that can only be read: the block says what it cannot write itself
        yield
        return
    with opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            with suppress(OSError):
                fcntl.flock(opened, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks
        yield


def _opened(lock: Path) -> IO[bytes]:
    """The file of a lock, made where there is none. One that another user has made can be locked without being written to."""
    try:
        return lock.open("ab")
    except PermissionError:
        return lock.open("rb")
