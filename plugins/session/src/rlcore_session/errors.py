"""The error of a session's call."""

from collections.abc import Iterable, Mapping
from typing import ClassVar

from rlcore.schema.problem import ProblemsError
from rlcore.spi import Problem


class CallError(ProblemsError):
    """The arguments of a call are wrong, or it comes at the wrong time. It computed nothing, and gradients stay."""

    exit_code = 2
    summary: ClassVar[str] = "problem(s) with the call"


def closed_session() -> CallError:
    """Return the error of a call that comes after `close`."""
    found, remedy = "a call of a closed session", "Open another with rlcore.open."
    return CallError([Problem(path="session", found=found, expected="an open one", remedy=remedy)])


def not_held(adapter: object, held: Mapping[str, int]) -> Problem:
    """Return the problem of samples of an adapter that the generator does not hold."""
    names = ", ".join(repr(name) for name, version in held.items() if version >= 0)
    remedy = "Bring it by use_adapter and sync. refit.max_adapters limits how many stay."
    return Problem(path="adapter", found=f"{adapter!r:.80}", expected=f"one of {names or 'none: it holds none'}", remedy=remedy)


def require_none(problems: Iterable[Problem]) -> None:
    """CallError with all problems, where there are any."""
    if found := list(problems):
        raise CallError(found)
