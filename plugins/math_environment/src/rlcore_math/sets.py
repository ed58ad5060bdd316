"""Normalises sets of real numbers: conditions such as "x < 0 or x > 2" and {x | x > 0} become intervals."""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product
from math import ceil, floor

from attrs import frozen

from rlcore_math.inequalities import approximate, solved
from rlcore_math.plain_numbers import plain_number

SEPARATOR = r"(?:(?:\\middle\s*)?(?:[|:;]|\\(?:mid|vert|colon)(?![A-Za-z]))|(?:\\text\s*\{\s*)?such that\s*\}?)"
IN_REALS = r"\\in\s*(?:\\math(?:bb|bf|rm)\s*\{?\s*R\s*\}?|\\?(?:R|Reals|reals)(?![A-Za-z]))"
BUILDER = re.compile(rf"\\?\{{\s*([A-Za-z])\s*(?:{IN_REALS})?\s*{SEPARATOR}((?:[^{{}}]|\{{[^{{}}]*\}})*?)\\?\}}")
INTEGERS = re.compile(
    rf"\\?\{{\s*([A-Za-z])\s*\\in\s*(?:\\math(?:bb|bf|rm)\s*\{{?\s*([ZN])\s*\}}?|([ZN])(?![A-Za-z]))"
    rf"\s*([\^_]\s*\{{?\s*(?:[+*]|>\s*0)\s*\}}?)?\s*{SEPARATOR}((?:[^{{}}]|\{{[^{{}}]*\}})*?)\\?\}}"
)
"""Integers, or natural numbers, that meet a condition."""
CONDITIONED = re.compile(rf"\\?\{{([^{{}}:;|]*?)\s*{SEPARATOR}([^{{}}]*?)\\?\}}")
"""Numbers that meet the condition before the separator and the one after it."""
MAX_INTEGERS = 1000
"""Most integers of a set that is written out."""
BRACES = re.compile(r"\\?\{([^{}]*?)\\?\}")
OR, AND = re.compile(r"\\(?:lor|vee|cup)(?![A-Za-z])"), re.compile(r"\\(?:land|wedge)(?![A-Za-z])")
RELATION = re.compile(r"<|>|=|\\(?:le|ge|neq?)(?![A-Za-z])")
OUTSIDE_SIGN = r"(?:\\(?:setminus|backslash)(?![A-Za-z])|-)"
REALS = re.compile(
    rf"(?:[A-Za-z]\s*\\in\s*)?(?:\\mathbb\s*\{{?\s*R\s*\}}?|R(?=\s*{OUTSIDE_SIGN}\s*[\\\[({{]))"
    r"\s*(?![\s}]*(?:[,;]|\\land(?![A-Za-z])))(.*)"
)
HALF = {"^+": "x>0", "_+": "x>0", "^-": "x<0", "_-": "x<0", "^*": "x\\ne 0"}
HALF |= dict.fromkeys(("^+_0", "_0^+"), "x\\ge 0") | dict.fromkeys(("^-_0", "_0^-"), "x\\le 0")
HALF |= dict.fromkeys(("^*_+", "_+^*"), "x>0")
OUTSIDE = re.compile(rf"{OUTSIDE_SIGN}\s*\\?\{{(.*?)\\?\}}")
OUTSIDE_INTERVAL = re.compile(rf"{OUTSIDE_SIGN}\s*([\[(])([^\[\](),;]+),([^\[\](),;]+)([\])])")
INTERVAL = re.compile(r"\s*([\[(])([^\[\](),;]+),([^\[\](),;]+)([\])])\s*")
CAP = re.compile(r"\\cap(?![A-Za-z])")
NOT_IN = re.compile(r"[A-Za-z]\s*\\(?:notin|not\s*\\in)(?![A-Za-z])\s*(.+)")
BOTH_SIGNS = re.compile(r"(?:[A-Za-z]\s*=\s*)?\\pm\s*(.+)")
SEMICOLON = re.compile(r"([\[\](][^\[\](),;{}]+);([^\[\](),;{}]+[\[\])])")
"""The bounds of an interval as many countries write them: [0;1]."""
REVERSED = re.compile(r"([\[\](])([^\[\](),;]+)[,;]([^\[\](),;]+)([\[\])])")
GREEK = re.compile(r"\\(?:alpha|beta|gamma|delta|theta|lambda|mu|phi|varphi|omega)(?![A-Za-z])")
DISTANCE = re.compile(r"\|\s*[A-Za-z]\s*(?:([-+])\s*([\d.]+)\s*)?\|\s*(<|>|\\le|\\ge)\s*(\d[^|]*)")
"""A condition on a distance such as |x - 2| < 1."""
ENDLESS = re.compile(r"([-+]?)\s*\\infty")


class _OtherForm(Exception):
    """Raised for a text that is no condition on one real number."""


@frozen
class _Span:
    """The numbers between two bounds, which are texts."""

    low: str
    has_low: bool
    high: str
    has_high: bool

    def __str__(self) -> str:
        return f"{'[' if self.has_low else '('}{self.low},{self.high}{']' if self.has_high else ')'}"


_Spans = list[_Span]


def in_intervals(answer: str) -> str:
    """Return a tidy answer with its sets and conditions as intervals, or as finite sets.

    Other parts stay, and so does a single inequality outside a set, which math-verify reads.
    """
    if len(names := {*GREEK.findall(answer)}) == 1 and RELATION.search(answer) and not _letters(answer):
        answer = answer.replace(names.pop(), "x")
    answer = SEMICOLON.sub(r"\1,\2", answer)
    if (both := BOTH_SIGNS.fullmatch(answer)) and plain_number(both[1]) is not None:
        return f"\\{{-{both[1]},{both[1]}\\}}"
    try:
        if match := REALS.fullmatch(answer):
            return _written(_reals(match[1]))
        if match := NOT_IN.fullmatch(answer):
            return _written(_reals(f"-{match[1]}"))
        if len(parts := CAP.split(answer)) > 1 and (BUILDER.search(answer) or all(map(INTERVAL.fullmatch, parts))):
            return _written(_common([_piece(part.strip()) for part in parts]))
        if match := INTEGERS.fullmatch(answer):
            return _integers(
                _spans(match[5], match[1]), "positive" if match[4] else "natural" if "N" in match.groups() else "all"
            )
        if (match := CONDITIONED.fullmatch(answer)) and RELATION.search(match[1]) and (variable := _variable(match[1])):
            return _written(_common([_spans(part, variable) for part in match.groups()]))
        if BUILDER.search(answer):
            pieces = re.split(r"\\cup(?![A-Za-z])", answer)
            return "\\cup".join(_built(piece.strip()) if BUILDER.search(piece) else piece for piece in pieces)
        inside = BRACES.fullmatch(answer)
        condition, relations = (answer if inside is None else inside[1]), RELATION.findall(answer)
        is_one = len(relations) == 1 and "\\ne" not in relations[0] and "\\in" not in answer and "|" not in answer
        if relations and (inside or not is_one) and (variable := _variable(condition)):
            return _written(_spans(condition, variable))
    except _OtherForm:
        return answer
    return _usual(answer)


def _piece(text: str) -> _Spans:
    """Return {x | ...} or an interval."""
    if match := INTERVAL.fullmatch(text):
        return [_Span(match[2].strip(), match[1] == "[", match[3].strip(), match[4] == "]")]
    if match := BUILDER.fullmatch(text):
        return _spans(match[2], match[1])
    raise _OtherForm


def _built(piece: str) -> str:
    """Return {x | ...} as intervals."""
    match = BUILDER.fullmatch(piece)
    if match is None:
        raise _OtherForm
    return _written(_spans(match[2], match[1]))


def _integers(spans: _Spans, which: str) -> str:
    """Return the integers in intervals as a finite set, or as ℤ and intervals with integer bounds. Natural numbers may begin
    with 0 or 1, so that a set of them that may have 0 keeps its form."""
    if which != "all":
        spans = _common([spans, [_Span("0", which == "natural", "\\infty", False)]])
    if which == "natural" and any(span.low == "0" and span.has_low for span in spans):
        raise _OtherForm
    pieces: list[str] = []
    numbers: set[int] = set()
    for span in spans:
        low = None if _sign(span.low) else _inner(span.low, span.has_low, 1)
        high = None if _sign(span.high) else _inner(span.high, span.has_high, -1)
        if low is None or high is None:
            begin, end = "(-\\infty" if low is None else f"[{low}", "\\infty)" if high is None else f"{high}]"
            pieces.append(f"{begin},{end}")
        elif high - low >= MAX_INTEGERS:
            raise _OtherForm
        else:
            numbers |= {*range(low, high + 1)}
    written = [f"\\{{{','.join(map(str, sorted(numbers)))}\\}}"] if numbers else []
    written += [f"\\mathbb{{Z}}\\cap{piece}" for piece in pieces]
    return "\\cup".join(written) or "\\emptyset"


def _inner(bound: str, is_included: bool, direction: int) -> int:
    """Return the integer next to a bound, on the side of the interval: above it for `direction` 1."""
    value = _value(bound) * direction
    inner = ceil(value) if is_included else floor(value) + 1
    return inner * direction


def _reals(rest: str) -> _Spans:
    """Return ℝ, its positive or negative half, or ℝ without some numbers as intervals."""
    rest = rest.strip()
    sign = re.sub(r"[{}\s]", "", rest)
    if sign[:1] == "_" and RELATION.match(sign[1:]):
        return _spans(f"x{sign[1:]}", "x")
    if sign in HALF:
        return _spans(HALF[sign], "x")
    if match := OUTSIDE_INTERVAL.fullmatch(rest):
        opening, low, high, closing = match.groups()
        below, above = "<" if opening == "[" else "\\le", ">" if closing == "]" else "\\ge"
        return _spans(f"x{below} {low}\\lor x{above} {high}", "x")
    match = OUTSIDE.fullmatch(rest)
    if match is None:
        raise _OtherForm
    return _spans(",".join(f"x\\ne {number}" for number in match[1].split(",")), "x")


def _usual(answer: str) -> str:
    """Return ]0,1[ as (0,1)."""
    if not (answer.startswith("]") or answer.endswith("[")):
        return answer
    opening, closing = {"]": "(", "[": "[", "(": "("}, {"[": ")", "]": "]", ")": ")"}
    return REVERSED.sub(lambda match: f"{opening[match[1]]}{match[2]},{match[3]}{closing[match[4]]}", answer)


def _variable(answer: str) -> str:
    """Return the one variable of conditions; empty where there is none, or several."""
    letters = _letters(answer)
    return letters.pop() if len(letters) == 1 else ""


def _letters(answer: str) -> set[str]:
    """Return the letters of an answer outside of commands."""
    return {*re.findall(r"[A-Za-z]", re.sub(r"\\mathbb\s*\{?\s*R\s*\}?|\\[A-Za-z]+", "", answer))}


def _spans(condition: str, variable: str) -> _Spans:
    """Return the numbers for which a condition holds. A comma means "and", or "or" where "and" leaves no number."""
    if OR.search(condition):
        return [span for part in OR.split(condition) for span in _spans(part, variable)]
    if AND.search(condition):
        return _common([_spans(part, variable) for part in AND.split(condition)])
    clauses = [part.strip() for part in re.split(r"[,;]", condition)]
    if re.match(rf"{variable}\s*\\neq?(?![A-Za-z])", clauses[0]):  # x ≠ 0, 1
        clauses = [f"{variable}\\ne {one}" if plain_number(one) is not None else one for one in clauses]
    parts = [_clause(clause, variable) for clause in clauses]
    return _common(parts) or [span for part in parts for span in part]


def _clause(text: str, variable: str) -> _Spans:
    """Return the numbers for which one relation, or a chain of two, holds."""
    if re.fullmatch(rf"{variable}\s*{IN_REALS}", text):
        return [_Span("-\\infty", False, "\\infty", False)]
    if match := DISTANCE.fullmatch(text):
        return _beside(match)
    signs = [sign.removesuffix("q") for sign in RELATION.findall(text)]
    sides = [side.strip() for side in RELATION.split(text)]
    if not all(sides) or len(signs) not in (1, 2):
        raise _OtherForm
    others = [side for side in sides if side != variable]
    if len(others) != len(signs) or any(re.search(rf"(?<![\\A-Za-z]){variable}(?![A-Za-z])", side) for side in others):
        return _common([_solution(*relation, variable) for relation in zip(sides, signs, sides[1:], strict=False)])
    if len(signs) == 2:
        first, second = (f"{sides[0]}{signs[0]} {variable}", f"{variable}{signs[1]} {sides[2]}")
        if sides[1] != variable or not ({*signs} <= {"<", "\\le"} or {*signs} <= {">", "\\ge"}):
            raise _OtherForm
        return _chained(_clause(first, variable)[0], _clause(second, variable)[0])
    sign, other = signs[0], sides[1 - sides.index(variable)]
    if sides[1] == variable:
        sign = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}.get(sign, sign)
    return _RELATIONS[sign](other)


def _solution(left: str, sign: str, right: str, variable: str) -> _Spans:
    """Return the numbers for which a relation holds that is to be solved."""
    found = solved(left, sign, right, variable)
    if found is None:
        raise _OtherForm
    return [_Span(*bounds) for bounds in found]


def _beside(match: re.Match[str]) -> _Spans:
    """Return the numbers that a DISTANCE allows."""
    middle, distance = plain_number(match[2] or "0"), plain_number(match[4])
    if middle is None or distance is None:
        raise _OtherForm
    center, radius = middle.value * (1 if match[1] == "-" else -1), distance.value
    low, high, is_closed = str(center - radius), str(center + radius), match[3] not in ("<", ">")
    if match[3] in ("<", "\\le"):
        return [_Span(low, is_closed, high, is_closed)]
    return [_Span("-\\infty", False, low, is_closed), _Span(high, is_closed, "\\infty", False)]


def _chained(one: _Span, other: _Span) -> _Spans:
    """Return the interval between two bounds. Bounds without a known value keep their written order."""
    try:
        return _common([[one], [other]])
    except _OtherForm:
        low, high = (one, other) if _sign(one.high) else (other, one)
        return [_Span(low.low, low.has_low, high.high, high.has_high)]


_RELATIONS: dict[str, Callable[[str], _Spans]] = {
    "<": lambda bound: [_Span("-\\infty", False, bound, False)],
    ">": lambda bound: [_Span(bound, False, "\\infty", False)],
    "\\le": lambda bound: [_Span("-\\infty", False, bound, True)],
    "\\ge": lambda bound: [_Span(bound, True, "\\infty", False)],
    "=": lambda bound: [_Span(bound, True, bound, True)],
    "\\ne": lambda bound: [_Span("-\\infty", False, bound, False), _Span(bound, False, "\\infty", False)],
}


def _common(parts: Sequence[_Spans]) -> _Spans:
    """Return the intersection of all parts."""
    common = parts[0]
    for part in parts[1:]:
        common = [span for one, other in product(common, part) if (span := _shared(one, other)) is not None]
    return common


def _shared(one: _Span, other: _Span) -> _Span | None:
    low = _further(one.low, one.has_low, other.low, other.has_low, 1)
    high = _further(one.high, one.has_high, other.high, other.has_high, -1)
    if _sign(low[0]) or _sign(high[0]) or (low[0] == high[0] and low[1] and high[1]):
        return _Span(*low, *high)
    below, above = _value(low[0]), _value(high[0])
    return _Span(*low, *high) if below < above or (below == above and low[1] and high[1]) else None


def _further(one: str, has_one: bool, other: str, has_other: bool, direction: int) -> tuple[str, bool]:
    """Return the bound that leaves fewer numbers: of two lower bounds (`direction` 1) the higher."""
    if _sign(one) or one == other:
        return (other, has_other and (has_one or bool(_sign(one))))
    if _sign(other):
        return one, has_one
    difference = (_value(one) - _value(other)) * direction
    return (one, has_one and (has_other or difference > 0)) if difference >= 0 else (other, has_other)


def _sign(bound: str) -> str:
    """Return the sign of an infinite bound; empty for a number."""
    match = ENDLESS.fullmatch(bound)
    return "" if match is None else match[1] or "+"


def _value(bound: str) -> Fraction:
    """Return the number that orders a bound: the bound itself, or its first digits."""
    number = plain_number(bound)
    value = approximate(bound) if number is None else number.value
    if value is None:
        raise _OtherForm
    return value


def _written(spans: _Spans) -> str:
    if not spans:
        return "\\emptyset"
    if all(span.low == span.high for span in spans):
        return f"\\{{{','.join(span.low for span in spans)}\\}}"
    return "\\cup".join(map(str, spans))
