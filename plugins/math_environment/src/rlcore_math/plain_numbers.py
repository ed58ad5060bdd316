"""Numbers that are worked out: 42, -1.5, 1,234, 3/4, 1 1/2, 12%, 3 \\times 10^5, with a unit or "x =" before them."""

import re
from fractions import Fraction

from attrs import frozen

from rlcore_math.units import unit_factor

MAX_CHARACTERS = 200
"""A longer text is no plain number."""
MIN_DECIMALS = 6
"""A decimal that rounds another number has at least so many places, and so many digits that count."""

UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"
WHOLE = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
MONEY = r"(?:\\?[$€£¥₹])?"
NUMBER = re.compile(
    rf"""
    (?P<sign>[-+]?)\s*{MONEY}\s*(?P<sign2>[-+]?)
    (?: \\frac\s*\{{\s*(?P<above>[-+]?{WHOLE})\s*\}}\s*\{{\s*(?P<below>[-+]?{WHOLE})\s*\}}
      | (?P<whole>\d+)\s*\\frac\s*\{{\s*(?P<whole_above>\d+)\s*\}}\s*\{{\s*(?P<whole_below>\d+)\s*\}}
      | (?P<mixed>\d+)\s+(?P<mixed_above>\d+)\s*/\s*(?P<mixed_below>\d+)
      | (?P<slash_above>{WHOLE})\s*/\s*(?P<slash_below>{WHOLE})
      | (?:(?P<mantissa>{UNSIGNED})\s*(?:\\times|\\cdot|\*|x)\s*)?
        10\s*\^\s*(?:\{{\s*(?P<exponent>[-+]?\d{{1,3}})\s*\}}|(?P<digit>\d)(?!\d))
      | (?P<decimal>{UNSIGNED})
    )
    (?P<rest>.*)
    """,
    re.VERBOSE | re.DOTALL,
)
PERCENT = re.compile(r"\\?%|percent(?:age)?|pct", re.IGNORECASE)
LEFT_SIDE = re.compile(r"(?P<left>.*?[^<>!\\=])\s*(?:=|\\approx(?![A-Za-z]))\s*(?P<right>[^=<>]*)", re.DOTALL)
SEVERAL = re.compile(
    r"[,;<>]|\\(?:le|ge|ne|neq|in|pm|mp|to|cup|cap|mid|mod|pmod|bmod|equiv|not)(?![A-Za-z])|\b(?:and|or)\b|\\\\"
)


@frozen(kw_only=True)
class PlainNumber:
    """A number as it is written."""

    value: Fraction
    is_percentage: bool = False
    """The value is that before the sign: 12 of 12%."""
    num_decimals: int = 0
    """Places after the point; negative where zeros follow the digits."""
    is_decimal: bool = False
    left: str = ""
    """The variable of `x = 5`."""

    def equals(self, other: "PlainNumber") -> bool:
        """Whether they are the same number. A percentage is a share, and also the number before its sign, as 12% may be asked
        for by "what percentage". 0.333333 is 1/3: decimals may be rounded, to MIN_DECIMALS at least."""
        if self.left and other.left and self.left != other.left:
            return False
        if self._is(other):
            return True
        if self.is_percentage == other.is_percentage:
            return False
        return self._share()._is(other) or self._is(other._share())

    def _is(self, other: "PlainNumber") -> bool:
        return self.value == other.value or self._rounds(other.value) or other._rounds(self.value)

    def _rounds(self, value: Fraction) -> bool:
        digits = abs(self.value) * 10**self.num_decimals if self.num_decimals >= 0 else 0
        if not self.is_decimal or self.num_decimals < MIN_DECIMALS or digits < 10 ** (MIN_DECIMALS - 1):
            return False
        return 2 * abs(self.value - value) * 10**self.num_decimals <= 1

    def _share(self) -> "PlainNumber":
        if not self.is_percentage:
            return self
        return PlainNumber(
            value=self.value / 100, num_decimals=self.num_decimals + 2, is_decimal=self.is_decimal, left=self.left
        )


def plain_number(text: str) -> PlainNumber | None:
    """The number that a tidy text is; None where it is something else, or has arithmetic left to do: 3*4, 2^5, 84/2."""
    if len(text) > MAX_CHARACTERS:
        return None
    left, right = _sides(text)
    match = NUMBER.fullmatch(_without_brackets(right))
    if match is None:
        return None
    rest = match["rest"].strip()
    is_percentage = False
    if percent := PERCENT.match(rest):
        is_percentage, rest = True, rest[percent.end() :].strip()
    factor = unit_factor(rest, spaced=match["rest"][:1].isspace() or is_percentage)
    written = _value(match)
    if factor is None or written is None or (match["sign"] and match["sign2"]):
        return None
    value, decimals = written
    return PlainNumber(
        value=(-value if "-" in match["sign"] + match["sign2"] else value) * factor,
        is_percentage=is_percentage,
        num_decimals=decimals or 0,
        is_decimal=decimals is not None and factor == 1,
        left=left,
    )


def _sides(text: str) -> tuple[str, str]:
    """Split at the last =; the left side counts where it is a lone variable."""
    match = LEFT_SIDE.fullmatch(text) if "=" in text or "\\approx" in text else None
    if match is None:
        return "", text.removeprefix("=").removeprefix("\\approx").strip()
    if SEVERAL.search(match["left"]):
        return "", text
    *_, right = re.split(r"=|\\approx(?![A-Za-z])", text)
    left = match["left"].strip()
    return (left if re.fullmatch(r"\\?[A-Za-z](?:_\{?\w+\}?)?", left) else ""), right.strip()


def _without_brackets(text: str) -> str:
    """5 of (5), {5}, \\{5\\} and [5]."""
    for opening, closing in (("(", ")"), ("[", "]"), ("\\{", "\\}"), ("{", "}")):
        inner = text[len(opening) : -len(closing)].strip()
        if text.startswith(opening) and text.endswith(closing) and not re.search(r"[(){}\[\],]", inner):
            return inner
    return text


def _value(match: re.Match[str]) -> tuple[Fraction, int | None] | None:
    """The value without its sign, and the places of a decimal."""
    part = {name: text.replace(",", "") for name, text in match.groupdict().items() if text is not None and name != "rest"}
    if (text := part.get("decimal")) is not None:
        return _decimal(text, 0)
    if (exponent := part.get("exponent") or part.get("digit")) is not None:
        return _decimal(part.get("mantissa", "1"), int(exponent))
    whole, above, below = (
        next((int(part[name]) for name in names if name in part), 0)
        for names in (
            ("whole", "mixed"),
            ("above", "whole_above", "mixed_above", "slash_above"),
            ("below", "whole_below", "mixed_below", "slash_below"),
        )
    )
    if below == 0 or (above and above % below == 0):
        return None  # a whole number that is not worked out
    return whole + Fraction(above, below), None


def _decimal(text: str, exponent: int) -> tuple[Fraction, int | None]:
    before, point, after = text.partition(".")
    value = Fraction(int(before + after or "0")) / 10 ** len(after)
    return value * Fraction(10) ** exponent, len(after) - exponent if point else None
