"""Observers around a backend's hooks: what the backend itself came to is kept, so that each answers for its own mistakes.

Whether a backend can be used after an error depends on who raised it: an observer's error leaves the backend as its own answer
said, and an error of its own may not.
"""

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any

from attrs import evolve

from rlcore.registry.discovery import ObserverEntry
from rlcore.registry.plugin_errors import attributed
from rlcore.registry.hooks import observer_problems
from rlcore.spi.errors import PluginError
from rlcore.spi.generator import GeneratorSpec
from rlcore.spi.hooks import hookimpl
from rlcore.spi.observer import ObserverContext
from rlcore.spi.trainer import TrainerSpec

Hook = Callable[..., Any]


def build_observers(
    entries: Sequence[ObserverEntry], context: ObserverContext, options: Mapping[str, object]
) -> tuple[ObserverEntry, ...]:
    """The observers of this process: those whose entry point names a class are built with the context, and with the options of
    their name. PluginError where one does not fit; what a constructor raises passes through, with a note that names it."""
    return tuple(_built(entry, context, options) for entry in entries)


def _built(entry: ObserverEntry, context: ObserverContext, options: Mapping[str, object]) -> ObserverEntry:
    if not isinstance(entry.observer, type):
        return entry
    if entry.config is not None and not isinstance(options.get(entry.name), entry.config):
        found = "found no options for it" if entry.name not in options else "found another class's options for it"
        raise PluginError(f"{entry.label}: {found}; expected the packages of the driver's machine on every machine")
    with attributed("raised while building", entry.label):
        observer = entry.observer(evolve(context, options=options.get(entry.name)))
    problems = list(observer_problems(observer, (TrainerSpec, GeneratorSpec)))
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise PluginError(f"{entry.label} does not fit its role, {len(problems)} problem(s):{lines}")
    return evolve(entry, observer=observer)


class CallRecord(threading.local):
    """The call under way in a thread; generators may be called from several at once."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the previous call's error, since another call begins."""
        self.answered = False
        self.result: object = None
        """What the backend returned, where it answered."""
        self.error: BaseException | None = None
        """The error that the backend raised, or None."""
        self.culprit: str | None = None
        """The observer that last raised an error of its own, or put another result in place of the one that it was given."""


def recorded(method: Hook, record: CallRecord) -> Hook:
    """A backend's hook that leaves its outcome in the record, inside all observers."""

    @hookimpl
    def answer(request: object) -> object:
        try:
            result = method(request=request)
        except BaseException as error:
            record.error = error
            raise
        record.answered, record.result = True, result
        return result

    return answer


def guarded(observer: str, name: str, wrapper: Hook, record: CallRecord) -> Hook:
    """An observer's hook that names the observer for what it does wrong; `observer` is how messages call it."""

    def malformed(found: str) -> PluginError:
        record.culprit = observer
        return PluginError(f"{observer}: {name} {found}; expected one yield, and its result returned")

    @hookimpl(wrapper=True)
    def guard(request: object) -> Generator[None, object, object]:
        watching = wrapper(request=request)
        try:
            next(watching)
        except StopIteration:
            raise malformed("ended without a yield") from None
        except BaseException:
            record.culprit = observer
            raise
        failure: BaseException | None = None
        given: object = None
        try:
            given = yield
            resume = partial(watching.send, given)
        except BaseException as error:
            failure = error
            resume = partial(watching.throw, error)
        try:
            resume()
        except StopIteration as stop:
            if failure is not None:
                failure.add_note(f"{observer} kept this error to itself; expected it raised again")
                raise failure from None
            if stop.value is not given:
                record.culprit = observer
            returned: object = stop.value
            return returned
        except BaseException as error:
            if error is not failure:
                record.culprit = observer
            raise
        raise malformed("yielded again") from failure

    return guard
