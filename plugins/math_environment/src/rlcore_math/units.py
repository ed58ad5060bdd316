"""Words behind a number that do not change it: units, currencies, the things that are counted."""

import re

MULTIPLES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
UNITS = re.compile(
    "mm|cm|dm|km|kg|mg|ml|cl|dl|ft|in|yd|mi|lbs?|oz|hrs?|min|sec|ms|am|pm|mph|kph|kmh|kwh?|mb|gb|hz|deg|rad|sq|cu|gal|pt|qt"
    "|usd|eur|gbp|rs",
    re.IGNORECASE,
)
LETTERS = re.compile("[mgshlcf]", re.IGNORECASE)
"""Units that are a variable as well, where they stand right behind the number."""
OPERATIONS = re.compile(
    "and|or|not|mod|over|plus|minus|times|squared|cubed|factorial|choose|to|by|of|from|dozen|half|pi|sin|cos|tan|log|exp"
    "|sqrt|max|gcd|lcm|inf|infinity|infty"
)
"""Words that make something else of the number."""
UNIT = re.compile(
    r"(?:\^\s*\\circ\s*[CFK]?|\\(?:text|textbf|textit|textrm|mathrm|mbox|operatorname)\s*\{(?P<styled>[^{}\d]*)\}"
    r"|(?P<bare>[A-Za-z]+))(?:\s*\^\s*\{?[1-3]\}?)?"
)
CURRENCIES = ("$", "\\$", "€", "£", "¥", "₹")


def unit_factor(text: str, *, spaced: bool) -> int | None:
    """The factor that the text behind a number stands for: 1 for units, 10**6 for "million". None where it is something else.

    `spaced` says whether a space stood between them: a word of three letters is a unit then.
    """
    factor = 1
    while text and text not in CURRENCIES:
        match = UNIT.match(text)
        if match is None:
            return None
        styled, bare = match["styled"], match["bare"]
        words = re.findall(r"[^\W\d_]+", (styled or bare or "").lower())
        if any(map(OPERATIONS.fullmatch, words)) or (bare and not _is_unit(bare, spaced=spaced)):
            return None
        factor *= next((MULTIPLES[word] for word in words if word in MULTIPLES), 1)
        rest = text[match.end() :]
        spaced = rest[:1] in (" ", "/") or styled is not None
        text = rest.lstrip(" /.")
    return factor


def _is_unit(word: str, *, spaced: bool) -> bool:
    if LETTERS.fullmatch(word):
        return spaced
    return UNITS.fullmatch(word) is not None or (spaced and len(word) >= 3)
