"""Observers: of backends, which may be built with a context, and of the training loop."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from attrs import frozen

from rlcore.schema.printable import plain_texts

LOOP_OBSERVER_GROUP = "rlcore.loop_observers"
"""Entry-point group of observers of the training loop, each a LoopObserverProvider under its name."""


@frozen(kw_only=True, field_transformer=plain_texts)
class LoopObserverProvider:
    """The description of one observer of the training loop.

    The names `bundles`, `checkpoint_evaluation`, `model_card` and `push_to_hub` stand for keys of a recipe. Only runs whose
    recipe sets the key have an observer of that name. An observer with `config` is one of the runs whose recipe has its table.
    Every run has each other observer.
    """

    name: str
    """Equal to the entry point's name."""
    spi: tuple[int, int]
    """The SPI version that the observer was written for: (major, minor)."""
    observer: str
    """`package.module:function`, called as function(rlcore.run.observers.ObservedRun) before a run's backends are built. It
    returns an rlcore.run.protocols.LoopObserver."""
    config: type | None = None
    """Frozen, keyword-only attrs class of the recipe's table `[NAME]`, every field with a docstring beneath it. `recipe.tables`
    holds the table by name, which is that of no section of rlcore. None where the observer has none."""
    check: str | None = None
    """`package.module:function`, called as function(plan) before a run, with its rlcore.run.plan.run_plan.RunPlan. It returns
    the Problems and Notes of the recipe; None where nothing can be wrong."""


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
    """The context of an observer whose entry point names a class: it is built as Class(context), once in each process of a run.

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
