"""Files of users: paths that begin with a home, limits of what is read, and keys of JSON with several values."""

import errno
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def expanded(path: str | Path) -> Path:
    """Return the path with its leading ~ or ~name replaced by that home, and unchanged where that home is unknown (see
    `has_home`)."""
    return Path(os.path.expanduser(path))


def has_home(path: str) -> bool:
    """Return False for a path that begins with an unknown home, or that has the character NUL."""
    return "\0" not in path and not os.path.expanduser(path).startswith("~")


MAX_BYTES = 256 * 2**20
"""Most bytes of a file that is read whole, other than a data set. The largest files of tokenizers have tens of MiB."""
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_file(path: Path, most: int = MAX_BYTES) -> bytes:
    """Read a regular file of at most `most` bytes. OSError where it is longer, or no regular file."""
    most = min(most, max(require_file(path, most), MAX_BYTES))  # Python reserves as many bytes as it is asked to read
    with open(path, "rb", opener=without_waiting) as file:
        content: bytes | None = file.read(most + 1)  # a file of /proc may hold more than its size says
    if content is None:
        raise OSError(errno.EAGAIN, "a file that waits for its content", str(path))
    if len(content) > most:
        raise _too_long(path, len(content), most)
    return content


def require_file(path: Path, most: int | None = None) -> int:
    """Return a file's size. OSError where the path is no regular file, or the file has more than `most` bytes. The path is not
    opened, since to open a named pipe may wait forever."""
    status = path.stat()
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"{_KINDS.get(kind, 'something')} that is no regular file", str(path))
    if most is not None and status.st_size > most:
        raise _too_long(path, status.st_size, most)
    return status.st_size


def memory_bytes() -> int:
    """Return the bytes of available memory, the upper limit for reading a data set."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # no Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def without_waiting(path: str, flags: int) -> int:
    """Open a file so that no read waits: an `opener`."""
    return os.open(path, flags | os.O_NONBLOCK)  # /proc/kmsg, for one, is a regular file and waits for messages


def _too_long(path: Path, found: int, most: int) -> OSError:
    return OSError(errno.EFBIG, f"more bytes than are read of such a file: {found:,}, beyond {most:,}", str(path))


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, as an `object_pairs_hook`. ValueError names a key that it has with different values."""
    found = dict(pairs)
    if len(found) < len(pairs):
        repeated = [(key, value) for key, value in pairs if value is not found[key]]
        for key, value in repeated:
            if json.dumps(value, sort_keys=True) != json.dumps(found[key], sort_keys=True):  # since 1 == True
                raise ValueError(f"found the key {key!r:.40} with different values in one object; expected one value")
    return found
