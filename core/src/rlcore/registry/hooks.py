"""Check hook signatures, and record a backend's own result inside its observers.

pluggy accepts hooks that are missing or asynchronous, or that drop arguments. It then returns None or fails at the call. So the
core compares each signature with the interface's before any call.

A backend stays usable after an observer's error, and may not after its own. So its result is recorded apart from theirs.
"""

import inspect
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from inspect import Parameter
from typing import Any

from rlcore.spi.errors import PluginError
from rlcore.spi.lifecycle import hookimpl

Hook = Callable[..., Any]
_IMPL = "rlcore_impl"
_SPEC = "rlcore_spec"


def hooks_of(spec: type) -> dict[str, Hook]:
    """The hooks that a specification class declares."""
    return {name: function for name, function in vars(spec).items() if hasattr(function, _SPEC)}


def marked_names(owner: object) -> list[str]:
    """Attributes of an object, module or class that carry the hookimpl marker; properties are not evaluated."""
    return [name for name in dir(owner) if isinstance(getattr(_static(owner, name), _IMPL, None), dict)]


def method_problems(cls: type, protocol: type, names: Sequence[str]) -> Iterator[str]:
    """Yield the faults of the named methods of `cls`, compared with those of `protocol`."""
    for name in names:
        expected = getattr(protocol, name)
        found = _static(cls, name)
        if found is None:
            yield f"{name}: missing; expected {_shown(name, expected)}"
        else:
            yield from (f"{name}: {problem}" for problem in _method_problem(name, found, expected))


def backend_problems(cls: type, spec: type) -> Iterator[str]:
    """Yield the faults of a backend class: a hook that is missing, unknown, not marked, a wrapper, or of another signature."""
    from rlcore.spi.generator import OPTIONAL_HOOKS, GeneratorSpec
    from rlcore.spi.trainer import OPTIONAL_TRAINER_HOOKS, SPLIT_HOOKS

    hooks = hooks_of(spec)
    optional: tuple[str, ...] = OPTIONAL_HOOKS if spec is GeneratorSpec else OPTIONAL_TRAINER_HOOKS
    if all(_static(cls, name) is not None for name in SPLIT_HOOKS):
        optional = (*optional, "train_step")
    yield from method_problems(cls, spec, [name for name in hooks if name not in optional or _static(cls, name) is not None])
    for name in hooks:
        if _static(cls, name) is not None and name not in marked_names(cls):
            yield f"{name}: not marked; decorate it with rlcore.spi.hookimpl"
    for name in marked_names(cls):
        options = getattr(_static(cls, name), _IMPL)
        if name not in hooks:
            yield f"{name}: no hook of this role; its hooks are {', '.join(hooks)}"
        if options.get("wrapper") or options.get("hookwrapper"):
            yield f"{name}: a wrapper; a backend answers itself, only observers wrap"
        if options.get("specname"):
            yield f"{name}: answers for {options['specname']!r} by specname; expected a hook of its own name"


def observer_problems(observer: object, specs: Sequence[type]) -> Iterator[str]:
    """Yield the faults of an observer: a hook that is unknown, no wrapper, or of another signature."""
    hooks = {name: function for spec in specs for name, function in hooks_of(spec).items()}
    names = marked_names(observer)
    if not names:
        yield "no hooks; expected methods decorated with rlcore.spi.hookimpl(wrapper=True)"
    if _static(observer, "after_step") is not None:  # which the interface's first version called
        yield "after_step: never called, since observers receive no metrics; write a sink"
    for name in names:
        found = getattr(observer, name)
        if name not in hooks:
            yield f"{name}: no hook of any role; hooks are {', '.join(sorted(hooks))}"
            continue
        if getattr(found, _IMPL).get("wrapper") is not True:
            yield f"{name}: not a wrapper; an observer's hooks are decorated with rlcore.spi.hookimpl(wrapper=True)"
        elif not inspect.isgeneratorfunction(found):
            yield f"{name}: no generator; a wrapper yields once and returns the result that the yield gave"
        yield from (f"{name}: {problem}" for problem in _parameter_problem(name, _parameters(found), hooks[name]))


def arguments_problem(function: Hook, *names: str) -> str | None:
    """Why a function, or a class, cannot be called with so many arguments by position, or None where it can."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # Python cannot tell, so that the call itself has to show it
        return None
    try:
        signature.bind(*names)
    except TypeError:
        bare = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
        shown = signature.replace(parameters=bare, return_annotation=signature.empty)
        return f"takes {shown}; expected ({', '.join(names)})"
    return None


def _method_problem(name: str, found: object, expected: Hook) -> Iterator[str]:
    if isinstance(found, staticmethod | classmethod) or not inspect.isroutine(found):
        yield f"a {type(found).__name__}; expected a plain method"
        return
    wanted = _flavour(expected)
    if _flavour(found) != wanted:
        yield f"{_flavour(found)}; expected {wanted}"
    parameters = _parameters(found)
    if parameters == []:
        yield f"takes no self; expected {_shown(name, expected)}"
        return
    yield from _parameter_problem(name, parameters[1:] if parameters else None, expected)


def _parameter_problem(name: str, found: list[Parameter] | None, expected: Hook) -> Iterator[str]:
    """Names, kinds and the absence of defaults; annotations are free."""
    if found is None:
        yield f"its signature cannot be read; expected {_shown(name, expected)}"
        return
    wanted = (_parameters(expected) or [])[1:]
    if [(p.name, p.kind, p.default) for p in found] != [(p.name, p.kind, p.default) for p in wanted]:
        shown = ", ".join(str(parameter.replace(annotation=Parameter.empty)) for parameter in found)
        keyword_only = " with keyword-only parameters" if any(p.kind is Parameter.KEYWORD_ONLY for p in found) else ""
        yield f"found {name}({shown}){keyword_only}; expected {_shown(name, expected)}"


def _parameters(function: Hook) -> list[Parameter] | None:
    """Parameters, a bound first one left out; None where Python cannot tell."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        return None


def _flavour(function: object) -> str:
    if inspect.iscoroutinefunction(function):
        return "an async def"
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        return "a generator"
    return "a plain def"


def _shown(name: str, expected: Hook) -> str:
    parameters = ", ".join(parameter.name for parameter in (_parameters(expected) or [])[1:])
    return f"{'async ' if inspect.iscoroutinefunction(expected) else ''}{name}({parameters})"


def _static(owner: object, name: str) -> Any:
    """The attribute as it is defined, descriptors not evaluated; None where there is none."""
    return inspect.getattr_static(owner, name, None)


class CallRecord(threading.local):
    """The call under way in a thread; generators may be called from several at once."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the previous call's error, since another call begins."""
        self.answered = False
        self.result: object = None
        """The backend's result, where it has returned one."""
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
    """Wrap an observer's hook and attribute its errors to it; `observer` is its name in messages."""

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
