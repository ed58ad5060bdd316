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


def held(name: str, problems: Iterable[str], text: str, command: str) -> Claim:
    """A claim that holds where there are no problems; else their list."""
    found = list(problems)
    return Claim(name=name, verdict="not held" if found else "held", text="; ".join(found) or text, command=command)


def missing(name: str, text: str, command: str) -> Claim:
    """A claim of which the run directory says nothing."""
    return Claim(name=name, verdict="not recorded", text=text, command=command)


def one_line(error: BaseException) -> str:
    """The text of an error in one line."""
    return " ".join(str(error).split())


def judged(name: str, command: str, judge: Callable[[Path], Claim], run: Path) -> Claim:
    """The claim that `judge` makes; damaged files are a claim that does not hold."""
    try:
        return judge(run)
    except (RlcoreError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        name_of = "" if isinstance(error, RlcoreError) else f"{type(error).__name__}: "
        text = f"{name_of}{one_line(error)}"[:LONGEST]
        return Claim(name=name, verdict="not held", text=f"a file cannot be read: {text}", command=command)
