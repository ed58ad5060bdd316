"""Whether a response gives the right answer, by math-verify. Runs in the worker processes: some expressions take for ever."""

import logging
import re
from typing import Literal, TypeAlias

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

Verdict: TypeAlias = Literal["right", "wrong", "no_answer", "unreadable_reference"]

TAIL_CHARACTERS = 8192
"""What is read of a response, from its end: math-verify's time grows with the square of the numbers it finds."""
BOXED_FIRST = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
MIXED_NUMBER = re.compile(r"(?<![\d.,/])(\d{1,9}) +(\d{1,9})/([1-9]\d{0,8})(?![\d.,]*\d|/)")

# math-verify warns at each start that its own time limits, which need the main thread's signals, are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def warm_up() -> None:
    """Load the grammar and what else the first response would wait for."""
    judge("\\frac{\\pi}{2}", "\\boxed{x^2}", require_boxed=False)


def judge(reference: str, response: str, *, require_boxed: bool) -> Verdict:
    """Compare a response with the reference answer, which is written in any form that MathConfig.answer_field lists."""
    expected = _parse(_boxed(reference))
    if not expected:
        return "unreadable_reference"
    tail = response[-TAIL_CHARACTERS:]
    if require_boxed and "\\boxed" not in tail:
        return "no_answer"
    given = _parse(tail)
    if not given:
        return "no_answer"
    return "right" if verify(expected, given, timeout_seconds=None) else "wrong"


def _boxed(reference: str) -> str:
    """The reference as LaTeX that math-verify takes for one answer."""
    final = reference.rsplit("####", 1)[-1].strip()
    return final if "\\boxed" in final or not final else f"\\boxed{{{final}}}"


def _parse(text: str) -> "list[object]":
    plain = MIXED_NUMBER.sub(_as_fraction, text.replace("\N{MINUS SIGN}", "-"))
    parsed: list[object] = parse(plain, BOXED_FIRST, parsing_timeout=None)
    return parsed


def _as_fraction(match: re.Match[str]) -> str:
    """1 1/2 as 3/2: math-verify reads its first number alone."""
    whole, numerator, denominator = (int(group) for group in match.groups())
    return f"{whole * denominator + numerator}/{denominator}"
