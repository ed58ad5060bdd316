"""Did-you-mean, for names in error messages."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a user who wrote `name` most likely meant; None where none is near."""
    return next(iter(get_close_matches(name, sorted(set(known)), n=1)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" for the nearest of the known names, or an empty string where none is near."""
    near = nearest(name, known)
    return f"; did you mean {near!r}?" if near else ""
