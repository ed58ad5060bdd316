"""Names in messages: the nearest of those that are known, and the first few of many."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to `name`, regardless of case; None where none is similar. The same
    letters in another order count as more similar than another letter."""
    folded = {one.lower(): one for one in sorted(set(known), reverse=True)}
    same_letters = (one for one in folded if sorted(one) == sorted(name.lower()))
    near = next(same_letters, None) or next(iter(get_close_matches(name.lower(), folded, n=1)), None)
    return None if near is None else folded[near]


def similar_path(path: Path, pattern: str = "*") -> str:
    """Return the path that the user most likely meant in place of one that does not exist; "" where none of that pattern is
    near."""
    if not path.parent.is_dir():
        return f"The folder {path.parent} does not exist."
    near = nearest(path.name, [entry.name for entry in path.parent.glob(pattern) if entry.name != path.name])
    return f"Did you mean {path.parent / near}?" if near else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" for the nearest of the known names, or an empty string where none is near."""
    near = nearest(name, known)
    return f"; did you mean {near!r}?" if near else ""


def listed(names: Sequence[str], most: int = 3, separator: str = ", ") -> str:
    """ "a, b, c and 2 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more
