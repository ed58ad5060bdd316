"""Foreign text is printed without control characters and without end, whatever its class does."""

import pytest

from rlcore.schema.printable import as_plain, class_name, printable


class Odd(str):
    __slots__ = ()

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Nameless(type):
    @property
    def __name__(cls) -> str:
        raise RuntimeError("no name")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain Ġ and é\n\tmore", "plain Ġ and é\n\tmore"),
        ("\x1b[2Jcleared\r\x07", r"\x1b[2Jcleared\r\x07"),
        ("\x9b31m \u202eturned", r"\x9b31m \u202eturned"),
        ("half \ud800", r"half \ud800"),
        ("m" * 300, "m" * 100 + " … (300 characters)"),
        (Odd("odd"), "odd"),
    ],
    ids=["plain", "escapes", "controls", "surrogate", "long", "odd"],
)
def test_a_terminal_obeys_nothing_of_a_printed_text(text: str, expected: str) -> None:
    assert printable(text, 100) == expected


def test_a_text_of_another_class_becomes_an_exact_text() -> None:
    assert type(as_plain(Odd("odd"))) is str
    assert as_plain(3) == 3


def test_a_class_that_hides_its_name_is_named() -> None:
    assert class_name(Nameless("Hidden\x1b", (), {})()) == r"Hidden\x1b"
