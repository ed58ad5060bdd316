"""A claim of a certificate: what holds in a run, with its figures and the command that shows it."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, TypeAlias

from attrs import frozen

from rlcore.spi import RlcoreError

LONGEST = 400
"""Characters of an error's text."""
Verdict: TypeAlias = Literal["held", "not held", "not recorded"]


@frozen(kw_only=True)
class Claim:
    """One line of a certificate."""

    name: str
    verdict: Verdict
    text: str
    """The figures, or what is missing."""
    command: str
    """The command that shows it."""


@frozen
class Judgement:
    """A verdict with its text."""

    verdict: Verdict
    text: str


def held(problems: Iterable[str], text: str) -> Judgement:
    """Holds where there are no problems; else their list."""
    found = list(problems)
    return Judgement("not held" if found else "held", "; ".join(found) or text)


def missing(text: str) -> Judgement:
    """The run directory says nothing of it."""
    return Judgement("not recorded", text)


def one_line(error: BaseException) -> str:
    """The text of an error in one line."""
    return " ".join(str(error).split())


def judged(name: str, command: str, judge: Callable[[Path], Judgement], run: Path) -> Claim:
    """The claim that `judge` decides; damaged files are a claim that does not hold. `command` names the run as RUN."""
    try:
        found = judge(run)
    except (RlcoreError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        name_of = "" if isinstance(error, RlcoreError) else f"{type(error).__name__}: "
        found = Judgement("not held", f"a file cannot be read: {name_of}{one_line(error)}"[:LONGEST])
    return Claim(name=name, verdict=found.verdict, text=found.text, command=command.replace("RUN", str(run)))
