"""What an observer may have besides hooks: a context that it is built with, and the figures of each step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from attrs import frozen


@frozen(kw_only=True)
class ObserverContext:
    """For an observer whose entry point names a class: it is built as Class(context), once in each process of a run.

    The class may have an attribute `config`, a frozen, keyword-only attrs class with a docstring beneath every field: the
    observer's section of a recipe, `[observers.NAME]`.
    """

    run_directory: Path | None
    """The run's, which holds what docs/run-directory.md lists and the observer's own files, under names of its own; it is made
    before anything is called. None where there is no run, as in `rlcore eval`."""
    rank: int | None = None
    """The trainer's rank in whose process hooks are called; None in the driver where ranks have processes of their own: no hook
    is called there, but `after_step` is."""
    options: Any = None
    """The recipe's section of the observer, an instance of its class's `config`; None where it has none."""


@runtime_checkable
class StepObserver(Protocol):
    """An observer that receives the figures of steps."""

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called in the driver once a step's line is in metrics.jsonl, with the figures of that line.

        `step` is 0 for the evaluation before the first. What it raises ends the run. A resumed run may
        call it for a step again.
        """
