"""Names in a message: the first few, and how many more there are."""

from collections.abc import Sequence


def listed(names: Sequence[str], most: int = 3, separator: str = ", ") -> str:
    """ "a, b, c and 2 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more
