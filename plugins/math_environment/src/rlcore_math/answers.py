"""Compares a response with the reference answer. It runs in worker processes, since some expressions never end."""

import logging
import re
from itertools import accumulate
from typing import Any, Literal, TypeAlias

from math_verify import ExprExtractionConfig, LatexExtractionConfig, LatexNormalizationConfig, parse, verify

from rlcore.thoughts import without_thoughts
from rlcore_math.boxes import BOX, last_box
from rlcore_math.notation import STYLED, plain, tidy
from rlcore_math.plain_numbers import plain_number
from rlcore_math.sets import in_intervals
from rlcore_math.units import OPERATIONS

Verdict: TypeAlias = Literal["right", "wrong", "no_answer", "unreadable_reference"]

TAIL_CHARACTERS = 8192
"""Number of characters read from the end of a response: math-verify's time grows with the square of the numbers it finds."""
MAX_ANSWER_CHARACTERS = 2000
"""Longest answer in characters; a longer one is wrong."""
FORMS = [
    # Units are taken off here: math-verify would take t, h, m and many other letters for one.
    LatexExtractionConfig(
        boxed_match_priority=0,
        normalization_config=LatexNormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all"
        ),
    ),
    ExprExtractionConfig(),
]
MAX_DEPTH = 40
"""Deepest nesting of brackets; a deeper answer is wrong, since the grammar's time grows fast with the depth."""
BOLD = re.compile(r"(?<!\S)\*\*(?=\S)([^*]+)\*\*")
MIXED_NUMBER = re.compile(r"(?<![\d.,/])(\d{1,9}) +(\d{1,9})/([1-9]\d{0,8})(?![\d.,]*\d|/)")
CLOSING_UNIT = re.compile(r"(?<=\S)\s*\\(?:text|textrm|mathrm|mbox)\s*\{[^{}\d\\]*\}(?:\s*\^\s*\{?[1-3]\}?)?$")
PIECES = re.compile(r"\\[{}]|[()\[\],;]|\\cup(?![A-Za-z])|(?<![A-Za-z])(?:and|or)(?![A-Za-z])")
NUMERAL = re.compile(r"[0-9A-Fa-f]+_(?:\{(\d+)\}|(\d+))")
OPERATION = re.compile(
    r"[*/^!:|]|(?<=[\w)}\]])\s*[-+]|(?<![\\A-Za-z])[A-Za-z]{2,}"
    r"|\\(?!(?:infty|emptyset|in|le|ge|mathbb)(?![A-Za-z]))[A-Za-z]+"
)
"""An operation in an answer that is no plain number."""
SET = re.compile(r"\\?\{[^()\[\]]*,[^()\[\]]*\\?\}")
PAIR = re.compile(r"\((?:(?!\\[{}])[^()\[\]])*,(?:(?!\\[{}])[^()\[\]])*\)")
"""A tuple or an open interval of numbers, which is no set of them."""
PRODUCT = re.compile(r"\d\s*\\?[({\[]|[)\]}]\s*(?:[(\[]|\d)")
"""A product that is written without a sign: 2(3), (2)(3)."""

# math-verify warns at each start that its own time limits, which need the main thread's signals, are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def warm_up() -> None:
    """Load the grammar and other modules that the first response needs."""
    judge("\\frac{\\pi}{2}", "\\boxed{x^2}", require_boxed=False)


def judge(reference: str, response: str, *, require_boxed: bool) -> Verdict:
    """Compare a response with the reference answer, which is written in any form that MathConfig.answer_field lists.

    The last box of the response is its answer; one that is empty or not closed is none. Without a box, and unless one is
    required, it is the last expression. What the response only thinks, as between <think> and </think>, is no answer. Where
    the reference is a number (or a tuple, set or interval of numbers), the answer must be worked out, so that the question
    itself is no answer.
    """
    final = reference.rsplit("####", 1)[-1]
    expected = _comparable(last_box(final) or ("" if BOX.search(final) else final))
    if not expected or plain(expected) == "nan":
        return "unreadable_reference"
    tail = without_thoughts(response)[-TAIL_CHARACTERS:]
    given = last_box(tail)
    if given is not None:
        return "right" if same(expected, _comparable(given)) else "wrong"
    if require_boxed:
        return "no_answer"
    parsed = _parse(BOLD.sub(r"\1", BOX.sub("{", tail)).replace("\N{MINUS SIGN}", "-"))
    if not parsed:
        return "no_answer"
    return "right" if same(expected, tidy(_text(parsed)), parsed) else "wrong"


def _comparable(text: str) -> str:
    """Return an answer in the notation in which answers are compared."""
    answer = tidy(text)
    return in_intervals(answer) if len(answer) <= MAX_ANSWER_CHARACTERS else answer


def same(expected: str, given: str, parsed: "list[Any] | None" = None) -> bool:
    """Return whether a tidy answer equals the tidy reference. `parsed` is the answer as math-verify parsed it."""
    if not given or len(given) > MAX_ANSWER_CHARACTERS or _depth(given) > MAX_DEPTH:
        return False
    words = plain(expected)
    if given == expected or (len(words) == 1 and words.isalpha() and _letter(plain(given)) == words):
        return True
    if _is_text(expected) or _is_text(given):
        return plain(given) == words
    number, other = plain_number(expected), plain_number(given)
    if number is not None and other is not None:
        return number.equals(other)
    if _base(expected) and _base(given) and _base(expected) != _base(given):
        return False
    if any(SET.fullmatch(one) and PAIR.fullmatch(other) for one, other in ((expected, given), (given, expected))):
        return False
    if re.search(r"\d\s+\d", given) or (_has_numbers_alone(expected) and not _is_worked_out(given)):
        return False
    return _equal(expected, given, parsed)


def _is_text(answer: str) -> bool:
    """Return whether an answer is words, not a product of letters: within \\text{}, or of three letters and more."""
    words = plain(answer)
    if not words or not re.fullmatch(r"[^\W\d_]+(?:[\s,;'./&-]+[^\W\d_]+)*", words):
        return False
    letters = [word for word in re.findall(r"[^\W\d_]+", words) if not OPERATIONS.fullmatch(word)]
    styled = STYLED.fullmatch(answer.strip()) is not None and len(words) > 1
    return (
        bool(letters)
        and "\\" not in STYLED.sub("", answer)
        and (styled or words == "no" or any(len(word) >= 3 or not word.isascii() for word in letters))
    )


def _letter(words: str) -> str:
    """Return the letter of a choice such as "(B) 42"."""
    match = re.fullmatch(r"\(?([a-z])[).:]\s*.*", words)
    return words if match is None else match.group(1)


def _depth(answer: str) -> int:
    """Return the depth of nested brackets."""
    depths = accumulate((one in "([{") - (one in ")]}") for one in answer)
    return max(depths, default=0)


def _base(answer: str) -> str:
    match = NUMERAL.fullmatch(answer)
    return "" if match is None else match.group(1) or match.group(2)


def _has_numbers_alone(answer: str) -> bool:
    """Return whether an expression is an evaluated number, or a tuple, set or interval of such."""
    return _is_worked_out(answer) and any(plain_number(piece) is not None for piece in _pieces(answer))


def _is_worked_out(answer: str) -> bool:
    """Return whether a number, or each part of a tuple, set or interval, is fully evaluated."""
    if plain_number(answer) is not None:
        return True
    open_pieces = [piece for piece in _pieces(answer) if plain_number(piece) is None]
    return not PRODUCT.search(answer) and not any(OPERATION.search(piece) for piece in open_pieces)


def _pieces(answer: str) -> list[str]:
    return [piece.strip() for piece in PIECES.split(answer) if piece.strip()]


def _equal(expected: str, given: str, parsed: "list[Any] | None") -> bool:
    """Return whether math-verify finds them equal."""
    gold, answer = _parse(_boxed(expected)), parsed or _parse(_boxed(given))
    expressions = [one for one in answer if not isinstance(one, str)]
    references = [one for one in gold if not isinstance(one, str)]
    if not expressions or not references:
        return "".join(expected.split()) == "".join(given.split())
    return bool(
        verify(
            references, expressions, float_rounding=_num_decimals(expected), allow_set_relation_comp=True, timeout_seconds=None
        )
    )


def _num_decimals(expected: str) -> int:
    """Return the decimal places to which math-verify compares: six significant digits of the reference's smallest number."""
    numbers = [number for piece in _pieces(expected) if (number := plain_number(piece)) and number.value]
    smallest = min((abs(number.value) for number in numbers), default=1)
    decimals = 6
    while smallest < 1 and decimals < 400:
        smallest, decimals = smallest * 10, decimals + 1
    return decimals


def _boxed(answer: str) -> str:
    """Return LaTeX that math-verify parses as one answer, without a unit after it."""
    without = CLOSING_UNIT.sub("", answer)
    return f"\\boxed{{{without}}}"


def _text(parsed: "list[Any]") -> str:
    """Return the text that math-verify parsed; a percentage keeps its sign."""
    text = next((one for one in parsed if isinstance(one, str)), "")
    arguments = getattr(parsed[0], "args", ())
    is_percentage = bool(arguments) and type(arguments[-1]).__name__ == "UnevaluatedExpr"
    return f"{text}\\%" if is_percentage and "%" not in text else text


def _parse(text: str) -> "list[Any]":
    plain_text = MIXED_NUMBER.sub(_as_fraction, text)
    parsed: list[Any] = parse(plain_text, FORMS, parsing_timeout=None)
    return parsed


def _as_fraction(match: re.Match[str]) -> str:
    """Return 1 1/2 as 3/2, since math-verify reads the first number alone."""
    whole, numerator, denominator = (int(group) for group in match.groups())
    return f"{whole * denominator + numerator}/{denominator}"
