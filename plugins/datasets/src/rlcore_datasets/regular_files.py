"""Folders of data sets that hold regular files alone."""

import errno
import os
from contextlib import suppress
from pathlib import Path

from rlcore.schema.file_limits import require_file


def require_tree(path: Path) -> None:
    """Refuse, with an OSError, a path or folder with anything but regular files and folders, or with a link that forms a
    loop."""
    if not path.is_dir():
        require_file(path)
        return
    above: dict[Path, tuple[str, ...]] = {path: (os.path.realpath(path),)}
    for folder, folders, files in os.walk(path, followlinks=True):
        parents = above.pop(Path(folder))
        for name in files:
            with suppress(FileNotFoundError):  # a dangling link; whoever needs the file reports it
                require_file(Path(folder, name))
        for name in folders:
            inner = Path(folder, name)
            real = os.path.realpath(inner)
            if real in parents:
                raise OSError(errno.ELOOP, f"a link to the folder {real}, in which it lies", str(inner))
            above[inner] = (*parents, real)
