"""Writing to disk: errors that say what to do, and files that no reader ever sees half of."""

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from rlcore.spi import StorageError

_WRITABLE = "Make it writable"
_REMEDIES: Mapping[int | None, str] = {
    errno.EFBIG: "Raise the limit on the size of files (`ulimit -f`)",
    errno.EACCES: _WRITABLE,
    errno.EPERM: _WRITABLE,
    errno.EROFS: _WRITABLE,
    errno.ENOENT: "Make that folder",
    errno.ENOTDIR: "Take a folder, not a file",
    errno.ENAMETOOLONG: "Take a shorter name",
}
"""Remedies by the error's number."""


def private(path: str, flags: int) -> int:
    """Create a file that only its owner can read, as an `opener` of `open`. Files that may hold secrets need it."""
    return os.open(path, flags, 0o600)


NAMED_OUTPUT = "name another file with -o"
"""Remedy for an output file that the command line names."""


@contextmanager
def storage_errors(what: str, directory: Path, otherwise: str = "point run.directory elsewhere") -> Iterator[None]:
    """Turn the operating system's errors of writing `what` into a StorageError that says what to do, or `otherwise`."""
    try:
        yield
    except OSError as error:
        free = ""
        with suppress(OSError):
            status = os.statvfs(directory if directory.exists() else directory.parent)
            free = f" ({status.f_bavail * status.f_frsize / 2**20:.0f} MiB free)"
        raise StorageError(
            f"{what} could not be written to {directory}{free}: {error.strerror or error}. "
            f"{_REMEDIES.get(error.errno, 'Make room')}, or {otherwise}. What was saved before is intact."
        ) from error


def write_atomically(path: Path, text: str, otherwise: str = "point run.directory elsewhere") -> None:
    """Replace `path` by `text` so that no reader, and no crash, ever sees half of it. StorageError as of storage_errors."""
    partial = path.with_name(f".{path.name}.partial")
    with storage_errors(path.name, path.parent, otherwise):
        try:
            with partial.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
