"""Paths that begin with a user's home: ~ the own one, ~name another user's."""

import os
from pathlib import Path


def expanded(path: str | Path) -> Path:
    """The path with its leading ~ or ~name replaced by that home; the path as it is where there is no such user, or no home
    known, which `has_home` tells."""
    return Path(os.path.expanduser(path))


def has_home(path: str) -> bool:
    """Whether the home that a path begins with, if any, is known; no path has the character NUL."""
    return "\0" not in path and not os.path.expanduser(path).startswith("~")
