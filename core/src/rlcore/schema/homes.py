"""Expands paths that begin with a user's home: ~ or ~name."""

import os
from pathlib import Path


def expanded(path: str | Path) -> Path:
    """Return the path with its leading ~ or ~name replaced by that home, and unchanged where that home is unknown (see
    `has_home`)."""
    return Path(os.path.expanduser(path))


def has_home(path: str) -> bool:
    """Return False for a path that begins with an unknown home, or that has the character NUL."""
    return "\0" not in path and not os.path.expanduser(path).startswith("~")
