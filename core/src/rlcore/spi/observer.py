"""What an observer is built with besides its hooks, and the run that a checkpoint evaluator measures."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from attrs import frozen

CHECKPOINT_EVALUATOR_GROUP = "rlcore.checkpoint_evaluators"
"""Functions, called as function(EvaluatedRun) -> LoopObserver with a method `close`: what measures a run's checkpoints as the
section `[checkpoint_evaluation]` says. A run uses the only one that is installed."""


@frozen(kw_only=True, eq=False)
class EvaluatedRun:
    """The run whose checkpoints are measured, as a checkpoint evaluator sees it in the driver."""

    recipe: Any
    """The recipe, whose section `checkpoint_evaluation` is not None."""
    directory: Path
    """The run directory. The evaluator's files are in its folder `evaluations`."""
    log: Callable[[int, Mapping[str, float]], None]
    """Write the figures of a step's checkpoint to metrics.jsonl and to sinks."""
    note: Callable[[str], None]
    """Tell the user."""
    waiting: Callable[[], AbstractContextManager[None]]
    """Opens a block that waits for an evaluation; its seconds are counted as such."""
    deferred: Callable[[], AbstractContextManager[None]]
    """Opens a block that an interrupt does not end."""


@frozen(kw_only=True)
class ObserverContext:
    """What an observer receives whose entry point names a class: it is built as Class(context), once in each process of a run.

    The class may have an attribute `config`, a frozen, keyword-only attrs class with a docstring beneath every field: the
    observer's section of a recipe, `[observers.NAME]`.
    """

    run_directory: Path | None
    """The run's, which holds what docs/run-directory.md lists and the observer's own files, under names of its own; it is made
    before anything is called. None where there is no run, as in `rlcore eval`."""
    rank: int = 0
    """The trainer's rank in whose process hooks are called."""
    options: Any = None
    """The recipe's section of the observer, an instance of its class's `config`; None where it has none."""
