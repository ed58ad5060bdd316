"""Foreign text: exact strings that are safe to print, and lone surrogates, which UTF-8 and tokenizers cannot encode."""

import unicodedata
from typing import Any

from attrs import Attribute

MOST = 100_000
"""Most characters of a message that are printed."""


def printable(text: str, most: int = MOST) -> str:
    """Return a text with its control characters and lone surrogates escaped; shortened where it has more than `most`."""
    text = plain_text(text)
    if len(text) > most:
        text = f"{text[:most]} … ({len(text):,} characters)"
    if text.isprintable():
        return text
    return "".join(
        letter if _is_shown(letter) else letter.encode("unicode_escape", "surrogatepass").decode("ascii") for letter in text
    )


def _is_shown(letter: str) -> bool:
    # Wide and unbreakable spaces, and what joins emoji, are ordinary text; Python calls them unprintable.
    return letter.isprintable() or letter in "\n\t\u200d" or unicodedata.category(letter) == "Zs"


def plain_text(text: str) -> str:
    """Return a text as an exact `str`; a subclass of a plugin's may override any method."""
    return str.__str__(text)


def as_plain(found: Any) -> Any:
    """Return a text as an exact `str`, and anything else as it is, for checks to refuse."""
    return plain_text(found) if isinstance(found, str) else found


def plain_texts(cls: type, fields: "list[Attribute[Any]]") -> "list[Attribute[Any]]":  # noqa: ARG001 - the form of attrs
    """Have an attrs class keep its texts as exact `str`: a `field_transformer`."""
    return [one.evolve(converter=as_plain) if one.converter is None else one for one in fields]


def class_name(thing: object) -> str:
    """Return the name of a thing's class, which a metaclass may hide."""
    name: str = type.__dict__["__name__"].__get__(type(thing))
    return printable(name)


def lone_surrogate(text: str) -> str | None:
    """Return a description of the first lone surrogate in a text, and its place; None without one."""
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"{described(text[error.start])} at character {error.start}"
    return None


def described(surrogate: str) -> str:
    """Return the words for a lone surrogate in messages."""
    return f"half a character (the surrogate \\u{ord(surrogate):04x} by itself)"
