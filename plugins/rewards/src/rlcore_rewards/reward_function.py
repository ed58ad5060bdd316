"""Calls one reward function: chooses its arguments, and describes its errors."""

import inspect
from collections.abc import Mapping, Sequence
from copy import deepcopy
from inspect import Parameter
from typing import Any

from attrs import evolve, frozen

from rlcore.spi import ConfigError, Problem, RewardError, RlcoreError, failure_kind
from rlcore_rewards.call_forms import CallForm, Sample, forms_of
from rlcore_rewards.score import RewardOutput, read
from rlcore_workers.functions import Function, is_async, load_function, place_in

KEY = "environment.function.path"
EXPECTED = "a function that takes any of prompt, completion, row, and fields of the row, by their names"
_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@frozen(kw_only=True)
class RewardFunction:
    """A function, and which arguments it takes."""

    name: str
    call: Function
    form: CallForm
    """The form of its calls."""
    takes: tuple[str, ...]
    needs: tuple[str, ...]
    """The arguments from the row that have no default."""
    takes_all: bool
    """True where it takes all fields of the row besides, as **kwargs."""

    @classmethod
    def of(cls, function: Function, path: str) -> "RewardFunction":
        """Describe a function. ConfigError where it cannot be called by names."""
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError) as error:
            found = f"{path!r}, whose arguments cannot be told ({error})"
            raise ConfigError([Problem(path=KEY, found=found, expected=EXPECTED)]) from error
        unnamed = [one.name for one in parameters if one.kind == Parameter.POSITIONAL_ONLY and one.default is Parameter.empty]
        if unnamed:
            found = f"{path!r}, which takes {', '.join(unnamed)} by position alone"
            raise ConfigError([Problem(path=KEY, found=found, expected=EXPECTED)])
        named = [one for one in parameters if one.kind in _NAMED]
        form, *others = forms_of([one.name for one in named])
        if others:
            found = f"{path!r}, whose arguments have the forms of {' and '.join(one.name for one in (form, *others))}"
            raise ConfigError([Problem(path=KEY, found=found, expected="arguments of one form")])
        return cls(
            name=getattr(function, "__name__", type(function).__name__),
            call=function,
            form=form,
            takes=tuple(one.name for one in named),
            needs=tuple(one.name for one in named if one.default is Parameter.empty and one.name not in form.parts),
            takes_all=any(one.kind == Parameter.VAR_KEYWORD for one in parameters),
        )

    @classmethod
    def load(cls, path: str) -> "RewardFunction":
        """Load the function that a recipe names. ConfigError where there is none that fits."""
        return cls.of(load_function(path, KEY), path)

    @property
    def is_async(self) -> bool:
        """Return whether it is awaited."""
        return is_async(self.call)

    def arguments(self, sample: Sample) -> dict[str, Any]:
        """The arguments for a sample: copies, which it may change."""
        own = evolve(sample, prompt=deepcopy(sample.prompt), row=deepcopy(dict(sample.row)))
        given = self.form.of_row(own.row) | self.form.of_sample(own)
        return {name: value for name, value in given.items() if self.takes_all or name in self.takes}

    def missing(self, row: Mapping[str, Any]) -> list[str]:
        """Return the arguments that the function needs and the row does not give."""
        given = self.form.of_row(row)
        return [name for name in self.needs if name not in given]

    def say(self, sample: Sample) -> RewardOutput:
        """Call the function on a sample. RewardError where it raises, or returns what is no reward."""
        try:
            value = self.call(**self.arguments(sample))
        except (Exception, SystemExit) as error:
            raise self._failure(error) from None
        return self._read(value)

    async def say_later(self, sample: Sample) -> RewardOutput:
        """Await an `async def` on a sample."""
        try:
            value = await self.call(**self.arguments(sample))
        except (Exception, SystemExit) as error:
            raise self._failure(error) from None
        return self._read(value)

    def _read(self, value: Any) -> RewardOutput:
        found = self.form.result(self.name, value)
        return RewardOutput(self.name, {}, applies=False) if found is None else read(self.name, found)

    def _failure(self, error: BaseException) -> RlcoreError:
        if isinstance(error, RlcoreError):
            return error
        raised = f"raised {type(error).__name__}{place_in(self.call, error)}: {error}"
        made = RewardError(f"the reward function {self.name!r} {raised}")
        if (kind := failure_kind(error)) != "environment":  # which stands for whatever a function raises by itself
            vars(made)["failure"] = kind
        return made


def load_all(paths: Sequence[str]) -> list[RewardFunction]:
    """The functions that a recipe names, in order. ConfigError with all that is wrong."""
    functions: list[RewardFunction] = []
    problems: list[Problem] = []
    for path in paths:
        try:
            functions.append(RewardFunction.load(path))
        except ConfigError as error:
            problems += error.problems
    problems += name_problems(functions)
    if problems:
        raise ConfigError(problems)
    return functions


def name_problems(functions: Sequence[RewardFunction]) -> list[Problem]:
    """A problem where two functions have one name, by which metrics and weights tell them apart."""
    names = [function.name for function in functions]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    return [Problem(path=KEY, found=f"{twice[0]!r} more than once", expected="functions of different names")] if twice else []
