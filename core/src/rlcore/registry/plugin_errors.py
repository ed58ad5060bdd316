"""Errors of plugins: whose one is, what ends a process where a plugin should have returned, and a list of what is wrong."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import TypeAlias

from rlcore.installed import foreign_module
from rlcore.schema.printable import class_name, plain_text
from rlcore.spi.errors import PluginError
from rlcore.time_limit import FalseInterruptError, LateError, loading


def listing_error(headline: str, problems: Iterable[str]) -> PluginError:
    """A PluginError with a line for each problem."""
    return PluginError("\n  - ".join([f"{headline}:", *problems]))


def exit_error(where: str, error: SystemExit) -> PluginError:
    """The error in place of a plugin's SystemExit, which no one would report: its code may even be that of success."""
    places = [f" in {frame.f_globals.get('__name__', '?')}, line {line}" for frame, line in walk_tb(error.__traceback__)]
    found = f"SystemExit({error.code!r}){places[-1] if places else ''}, which ends the process"
    return PluginError(f"{where}: found {found}; expected a return, or an error raised")


SLOW = 10.0
"""Multiple of the usual time limit for an import of a backend: torch and engines load slowly from some disks."""
Check: TypeAlias = Callable[[BaseException], bool]
_ENDS_PROCESS: set[Check] = set()


def add_ending(ends_process: Check) -> None:
    """Have an execution say by which errors it ends this process, at any line of code: no plugin is to blame for them."""
    _ENDS_PROCESS.add(ends_process)


def is_ordered(error: BaseException) -> bool:
    """Return whether the execution ends this process by an error."""
    return any(ends_process(error) for ends_process in _ENDS_PROCESS)


def is_outside(error: BaseException) -> bool:
    """Return whether an error comes from outside of the running code: from Ctrl-C, or from the execution ending the process."""
    return issubclass(type(error), KeyboardInterrupt) or is_ordered(error)  # isinstance asks the error for its __class__


def message_of(error: BaseException) -> str:
    """Return an error's message, or a note where its `__str__` fails or does not end."""
    try:
        with loading("the text of an error"):
            foreign = foreign_module(error) if isinstance(error, ImportError) else None
            return plain_text(str(error)) + (f" ({foreign} is for another Python: install its package anew)" if foreign else "")
    except (LateError, FalseInterruptError) as failure:
        return f"<{failure}>"
    except BaseException as failure:
        if is_outside(failure):
            raise
        return f"<its text raises {class_name(failure)}>"


def fault_of(error: BaseException) -> str:
    """Return the class and message of an error of a plugin's. One that comes from outside is raised."""
    if is_outside(error):
        raise error
    return described(error)


def described(error: BaseException) -> str:
    """Return an error's class and message."""
    return f"{class_name(error)}: {message_of(error)}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the name of its class where it has none."""
    return message_of(error).partition("\n")[0] or class_name(error)


def blame(error: BaseException, owner: str) -> None:
    """Keep with an error, also on its way from a worker, that it is the own one of what messages call `owner`."""
    error.rlcore_owner = owner  # type: ignore[attr-defined]


def owner_of(error: BaseException) -> str | None:
    """Whose own error it is, where that is known."""
    return getattr(error, "rlcore_owner", None)


@contextmanager
def in_time(what: str, times: float = 1.0) -> Iterator[None]:
    """Limits what a plugin is asked before a run, or has to build, as loading it is: PluginError names what is late, or raises
    KeyboardInterrupt by itself."""
    try:
        with loading(what, times):
            yield
    except (LateError, FalseInterruptError) as error:
        raise PluginError(str(error)) from error


@contextmanager
def attributed(what: str, owner: str) -> Iterator[None]:
    """Calls into a plugin outside its hooks: what they raise passes through as the own error of `owner`, as messages call it,
    with a note of what it was doing, such as "raised in build_batch of"; but for what ends the process."""
    try:
        yield
    except BaseException as error:  # a panic in a native library is no Exception
        if is_outside(error) or owner_of(error) not in (None, owner):  # of a plugin that this one has called
            raise
        if isinstance(error, SystemExit):
            raise exit_error(f"{what} {owner}", error) from error
        error.add_note(f"{what} {owner}")
        blame(error, owner)
        raise
