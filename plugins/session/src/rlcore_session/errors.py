"""The error of a session's call."""

from collections.abc import Iterable
from typing import ClassVar

from rlcore.schema.problem import ProblemsError
from rlcore.spi import Problem


class CallError(ProblemsError):
    """The arguments of a call are wrong, or it comes at the wrong time. It computed nothing, and gradients stay."""

    exit_code = 2
    summary: ClassVar[str] = "problem(s) with the call"


def require_none(problems: Iterable[Problem]) -> None:
    """CallError with all problems, where there are any."""
    if found := list(problems):
        raise CallError(found)
