"""Reading files that somebody else names: nothing that never ends, and no more bytes than there is reason for.

What cannot be read is an OSError whose `strerror` says what was found and what was expected.
"""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

MAX_BYTES = 256 * 2**20
"""The most bytes of a file that is read whole and is no data set: a tokenizer's largest has some tens of MiB."""
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_file(path: Path, most: int = MAX_BYTES) -> bytes:
    """Return what a regular file holds, at most so many bytes. OSError where it is none, or longer."""
    require_file(path, most)
    with path.open("rb") as file:
        content = file.read(most + 1)  # a file of a system's may hold more than it says
    if len(content) > most:
        raise _too_long(path, len(content), most)
    return content


def require_file(path: Path, most: int | None = None) -> None:
    """OSError where a path is no regular file that can be read, or longer than `most` bytes. To open another one may wait
    forever, and so it is not opened."""
    status = path.stat()
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"{_KINDS.get(kind, 'something')} that is no regular file", str(path))
    if most is not None and status.st_size > most:
        raise _too_long(path, status.st_size, most)


def require_tree(path: Path) -> None:
    """OSError where a path, or anything in the folder that it is, is neither a regular file nor a folder, or is a folder that
    leads back into itself."""
    if not path.is_dir():
        require_file(path)
        return
    above: dict[Path, tuple[str, ...]] = {path: (os.path.realpath(path),)}
    for folder, folders, files in os.walk(path, followlinks=True):
        parents = above.pop(Path(folder))
        for name in files:
            with suppress(FileNotFoundError):  # a link to what is gone; whoever needs it says so
                require_file(Path(folder, name))
        for name in folders:
            inner = Path(folder, name)
            real = os.path.realpath(inner)
            if real in parents:
                raise OSError(errno.ELOOP, f"a link to the folder {real}, in which it lies", str(inner))
            above[inner] = (*parents, real)


def memory_bytes() -> int:
    """Return the memory that is free: the most that can be read of a data set."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # no Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _too_long(path: Path, found: int, most: int) -> OSError:
    return OSError(errno.EFBIG, f"more bytes than are read of such a file: {found:,}, beyond {most:,}", str(path))
