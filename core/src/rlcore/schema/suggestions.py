"""Did-you-mean, for names in error messages."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" for the nearest of the known names, or an empty string where none is near."""
    nearest = get_close_matches(name, sorted(set(known)), n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""
