"""Finds the paths that a Python interpreter needs: its binary, its library, and the shared libraries that these load."""

import json
import mmap
import os
import re
import struct
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from attrs import frozen

from rlcore.spi import PluginError

START_S = 60.0
"""Timeout in seconds for an interpreter that prints its paths."""
ASKED = "import json, sys; print(json.dumps([sys.base_prefix, sys.prefix, sys.path]))"
LOADER_CACHE = Path("/etc/ld.so.cache")
LIBRARY_FOLDERS = ("/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/local/lib")
ALSO_NEEDED = ("/usr/share/zoneinfo", "/usr/lib/locale/C.utf8", str(LOADER_CACHE))
PACKAGES = ("site-packages", "dist-packages")
OPENED_LATE = "libgcc_s.so.1"
"""A library that glibc loads when a thread ends."""
ELF = b"\x7fELF\x02\x01"
SEGMENT_DYNAMIC, SEGMENT_LOADER, TAG_NEEDED, TAG_TEXTS = 2, 3, 1, 5


@frozen(kw_only=True)
class Needed:
    """Paths that an interpreter needs."""

    visible: tuple[str, ...]
    """Files and folders; a folder comes before its content."""
    hidden: tuple[str, ...]
    """Folders of packages inside these, which programs do not see."""


@cache
def needed_by(python: Path, flags: tuple[str, ...], variables: tuple[tuple[str, str], ...]) -> Needed:
    """Return the paths that an interpreter needs with these flags and variables. PluginError where it does not start."""
    base, prefix, search = _ask(python, flags, dict(variables))
    folders = [path for path in search if os.path.isdir(path)]
    hidden = [os.path.join(folder, name) for folder in folders for name in PACKAGES]
    links = list(_links(str(python)))
    hidden = [path for path in hidden if path not in folders]
    extensions = [file for folder in folders for file in _extensions(folder, hidden)]
    searched = [*dict(variables).get("LD_LIBRARY_PATH", "").split(":"), f"{base}/lib", *LIBRARY_FOLDERS]
    libraries = _libraries([links[-1], *extensions], searched)
    files = [*links, *libraries, *(path for path in search if os.path.isfile(path)), f"{prefix}/pyvenv.cfg", *ALSO_NEEDED]
    return Needed(
        visible=tuple(sorted({path for path in [*folders, *files] if os.path.exists(path)})),
        hidden=tuple(path for path in hidden if os.path.isdir(path)),
    )


def _ask(python: Path, flags: Sequence[str], variables: Mapping[str, str]) -> tuple[str, str, list[str]]:
    try:
        found = subprocess.run(
            [python, "-P", "-s", "-B", *flags, "-c", ASKED],
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=START_S,
            check=True,
        )
        base, prefix, search = json.loads(found.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise PluginError(f"the interpreter {python} does not start: {error}. See environment.code.python") from error
    return base, prefix, [path for path in search if os.path.isabs(path)]


def _links(path: str) -> Iterator[str]:
    """Return a path and, for a link, each path that it leads to."""
    for _ in range(40):
        yield path
        if not os.path.islink(path):
            return
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))


def _extensions(folder: str, hidden: Sequence[str]) -> Iterator[str]:
    """Return the extension modules in a folder, without Tk's, since programs have no display."""
    for path, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if os.path.join(path, name) not in hidden]
        yield from (os.path.join(path, name) for name in files if ".so" in name and not name.startswith("_tkinter"))


def _libraries(files: Iterable[str], folders: Iterable[str]) -> set[str]:
    """Return the shared libraries that files need, directly or through others."""
    known = _cached_libraries()
    searched = [folder for folder in folders if folder]
    found: set[str] = set()
    todo = list(files)
    while todo:
        for named in {OPENED_LATE, *_named_libraries(todo.pop())}:
            name = os.path.basename(named)
            candidates = [named, *(f"{folder}/{name}" for folder in searched), *known.get(name, ())]
            new = {path for path in candidates if os.path.isabs(path) and os.path.isfile(path)} - found
            found |= new
            todo += new
    return {step for path in found for step in _links(path)}


def _cached_libraries() -> dict[str, list[str]]:
    """Return the paths in the loader's cache by library name; empty without a cache."""
    known: dict[str, list[str]] = {}
    if LOADER_CACHE.is_file():
        for path in re.findall(rb"/[^\0]+", LOADER_CACHE.read_bytes()):
            known.setdefault(os.path.basename(os.fsdecode(path)), []).append(os.fsdecode(path))
    return known


def _named_libraries(file: str) -> set[str]:
    """Return the names of the shared libraries that a 64-bit ELF file needs, and the path of its loader."""
    try:
        with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _needed_names(content) if content[:6] == ELF else set()
    except (OSError, ValueError, struct.error):  # an unreadable, empty or truncated file
        return set()


def _needed_names(content: mmap.mmap) -> set[str]:
    (start,) = struct.unpack_from("<Q", content, 32)
    size, number = struct.unpack_from("<HH", content, 54)
    segments = [struct.unpack_from("<IIQQQQ", content, start + index * size) for index in range(number)]
    names = {_text(content, offset) for kind, _, offset, *_ in segments if kind == SEGMENT_LOADER}
    for kind, _, offset, _, _, length in segments:
        if kind != SEGMENT_DYNAMIC:
            continue
        entries = [struct.unpack_from("<QQ", content, at) for at in range(offset, offset + length, 16)]
        table = next(value for tag, value in entries if tag == TAG_TEXTS)
        base = next(
            at + table - address
            for kind, _, at, address, _, held in segments
            if kind == 1 and address <= table < address + held
        )
        names |= {_text(content, base + value) for tag, value in entries if tag == TAG_NEEDED}
    return names


def _text(content: mmap.mmap, offset: int) -> str:
    return os.fsdecode(content[offset : content.find(b"\0", offset)])
