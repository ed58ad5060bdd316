"""The table `[callbacks]`: classes of the user's whose methods follow a run, as callbacks of transformers' Trainer do."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rlcore.run.observers import ObservedRun
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.protocols import CollectedRollouts, LoopObserver, TrainedStep
from rlcore.schema.suggestions import nearest
from rlcore.spi import ConfigError, PluginError, Problem
from rlcore_report.callbacks_config import CallbacksConfig
from rlcore_rollout.logged_samples import logged_samples
from rlcore_workers.functions import load_function, place_in

KEY = "callbacks.path"
EVENTS = ("on_step_end", "on_evaluate", "on_save", "on_sample")
"""The methods; each takes a step and what belongs to the event."""
EVALUATION = "eval/"
"""The beginning of the names of metrics of an evaluation."""
FORM = '"FILE.py:CLASS" or "MODULE:CLASS"'
Method = Callable[[int, Any], object]


class Callbacks(LoopObserver):
    """Calls the methods of the user's objects, in the order of their classes in the recipe."""

    def __init__(self, run: ObservedRun) -> None:
        self._tokenizer, self._directory = run.tokenizer, run.directory
        self._options = _options(run.plan)
        self._objects = [(path, _made(path)) for path in _paths(self._options)]
        self.reads_checkpoints = self._has("on_save")

    def on_step_trained(self, step: TrainedStep) -> Mapping[str, float]:
        """Call on_sample with samples of a step of rollouts."""
        if isinstance(step.sampled, CollectedRollouts) and self._has("on_sample"):
            most = self._options.num_samples
            self._call("on_sample", step.step, logged_samples(step.sampled, step.trained, most, self._tokenizer))
        return {}

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Call on_evaluate with the metrics of an evaluation, and on_step_end with all of a step."""
        evaluated = {name: value for name, value in metrics.items() if name.startswith(EVALUATION)}
        if evaluated:
            self._call("on_evaluate", step, evaluated)
        if step > 0:
            self._call("on_step_end", step, dict(metrics))

    def on_checkpoint_saved(self, step: int, export: Callable[..., Path]) -> None:  # noqa: ARG002
        """Call on_save with the checkpoint's folder."""
        self._call("on_save", step, self._directory.checkpoints / f"step-{step:06d}")

    def _has(self, event: str) -> bool:
        return any(hasattr(one, event) for _, one in self._objects)

    def _call(self, event: str, step: int, what: object) -> None:
        """Call a method of each object that has it. PluginError where one raises."""
        for path, one in self._objects:
            if (method := getattr(one, event, None)) is not None:
                try:
                    method(step, what)
                except Exception as error:
                    place = place_in(method, error)
                    raise PluginError(f"{KEY} = {path!r}: {event} raised {type(error).__name__}{place}: {error}") from error


def callback_problems(plan: RunPlan) -> Iterator[Problem]:
    """Yield what is wrong with the classes that the table names."""
    for path in _paths(_options(plan)):
        try:
            cls = load_function(path, KEY, FORM)
        except ConfigError as error:
            yield from error.problems
            continue
        if not isinstance(cls, type):
            yield Problem(path=KEY, found=f"{path!r}, which is no class", expected=FORM)
            continue
        yield from _class_problems(path, cls)


def _class_problems(path: str, cls: type) -> Iterator[Problem]:
    named = [name for name in dir(cls) if name.startswith("on_") and callable(getattr(cls, name))]
    expected = f"methods named {', '.join(EVENTS)}, each with the arguments step and what it is called with"
    for name in sorted({*named} - {*EVENTS}):
        near = nearest(name, EVENTS)
        remedy = f"Did you mean {near}?" if near else ""
        yield Problem(path=KEY, found=f"{path!r} with a method {name}", expected=expected, remedy=remedy)
    if not {*named} & {*EVENTS}:
        yield Problem(path=KEY, found=f"{path!r}, without a method that is called", expected=expected)
    for name in (one for one in EVENTS if one in named):
        if fault := _fault(getattr(cls, name), None, 1, None):
            yield Problem(path=KEY, found=f"{path!r}, whose {name} {fault}", expected=expected)
    if fault := _fault(cls):
        yield Problem(path=KEY, found=f"{path!r}, which {fault}", expected="a class that is built without arguments")


def _fault(function: Callable[..., object], *arguments: object) -> str | None:
    """Return why a function cannot be called with arguments; None where it can."""
    if inspect.iscoroutinefunction(function):
        return "is an `async def`"
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError) as error:
        return f"cannot be called so ({error})"
    return None


def _made(path: str) -> object:
    """Return an object of a class. PluginError where its constructor raises."""
    try:
        return load_function(path, KEY, FORM)()
    except Exception as error:
        raise PluginError(f"{KEY} = {path!r}: building it raised {type(error).__name__}: {error}") from error


def _paths(options: CallbacksConfig) -> Sequence[str]:
    return (options.path,) if isinstance(options.path, str) else options.path


def _options(plan: RunPlan) -> CallbacksConfig:
    return cast("CallbacksConfig", plan.recipe.tables["callbacks"])
