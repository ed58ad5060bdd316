"""Attribute errors to plugins, and tell them from errors with which an execution ends the process."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import TypeAlias

from rlcore.installed import foreign_module
from rlcore.schema.printable import class_name, plain_text
from rlcore.spi.errors import PluginError
from rlcore.time_limit import FalseInterruptError, LateError, loading


def listing_error(headline: str, problems: Iterable[str]) -> PluginError:
    """Return a PluginError with a line for each problem."""
    return PluginError("\n  - ".join([f"{headline}:", *problems]))


def exit_error(where: str, error: SystemExit) -> PluginError:
    """Return an error to raise instead of a plugin's SystemExit, whose code may even report success."""
    places = [f" in {frame.f_globals.get('__name__', '?')}, line {line}" for frame, line in walk_tb(error.__traceback__)]
    found = f"SystemExit({error.code!r}){places[-1] if places else ''}, which ends the process"
    return PluginError(f"{where}: found {found}; expected a return, or an error raised")


SLOW = 10.0
"""Multiple of the usual time limit for an import of a backend: torch and engines load slowly from some disks."""
Check: TypeAlias = Callable[[BaseException], bool]
_ENDS_PROCESS: set[Check] = set()


def register_fatal_error(ends_process: Check) -> None:
    """Register a check for errors with which an execution ends this process, at any line of code. No plugin owns them."""
    _ENDS_PROCESS.add(ends_process)


def is_fatal_to_process(error: BaseException) -> bool:
    """Return whether the execution ends this process with this error."""
    return any(ends_process(error) for ends_process in _ENDS_PROCESS)


def is_outside(error: BaseException) -> bool:
    """Return whether an error comes from outside the running code: from Ctrl-C, or from the execution ending the process."""
    return issubclass(type(error), KeyboardInterrupt) or is_fatal_to_process(
        error
    )  # isinstance asks the error for its __class__


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
    """Return the class and message of a plugin's error. Raise an error that comes from outside."""
    if is_outside(error):
        raise error
    return described(error)


def described(error: BaseException) -> str:
    """Return an error's class and message."""
    return f"{class_name(error)}: {message_of(error)}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the name of its class if it has none."""
    return message_of(error).partition("\n")[0] or class_name(error)


def set_error_owner(error: BaseException, owner: str) -> None:
    """Set the plugin that raised an error, by its name in messages; the error keeps it on its way from a worker."""
    error.rlcore_owner = owner  # type: ignore[attr-defined]


def owner_of(error: BaseException) -> str | None:
    """Return the plugin that raised an error; None where it is unknown."""
    return getattr(error, "rlcore_owner", None)


@contextmanager
def in_time(what: str, times: float = 1.0) -> Iterator[None]:
    """Limit the time of a plugin's call before a run, as loading it is limited. PluginError names the late call, or one that
    raises KeyboardInterrupt by itself."""
    try:
        with loading(what, times):
            yield
    except (LateError, FalseInterruptError) as error:
        raise PluginError(str(error)) from error


@contextmanager
def attributed(what: str, owner: str) -> Iterator[None]:
    """Attribute errors of a call outside the hooks to `owner`, the plugin's name in messages. A note says what it was doing,
    such as "raised in build_batch of". Errors that end the process pass unchanged."""
    try:
        yield
    except BaseException as error:  # a panic in a native library is no Exception
        if is_outside(error) or owner_of(error) not in (None, owner):  # of a plugin that this one has called
            raise
        if isinstance(error, SystemExit):
            raise exit_error(f"{what} {owner}", error) from error
        error.add_note(f"{what} {owner}")
        set_error_owner(error, owner)
        raise
