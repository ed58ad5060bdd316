"""Collectors of a run's samples: what the core asks of one, and which one a run takes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from attrs import frozen

from rlcore.registry.run_parts import collector
from rlcore.run.data.prompt_stream import PromptOrder
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.protocols import LoopObserver, Source, WeightSync
from rlcore.run.report.progress import Progress
from rlcore.run.report.sinks import Sinks
from rlcore.run.report.timing import PhaseClock
from rlcore.run.train_step.scorers import OnTokens
from rlcore.spi import Note, Observation, PluginError, Problem, Row, Tokenizer
from rlcore.spi.arrays import Int64Array
from rlcore.spi.collector import RunKind
from rlcore.spi.execution import GeneratorGroup


@frozen(kw_only=True, eq=False)
class CollectorContext:
    """The run that a collector is built for, of which no backend is built yet."""

    plan: RunPlan
    """The run's plan, which has an environment."""
    tokenizer: Tokenizer
    vocab_size: int | None
    """The number of the model's tokens; None where it is not known."""
    resume: bool = False
    """True where the run continues from a checkpoint."""


@frozen(kw_only=True, eq=False)
class PromptRows:
    """Rows of a split, and which of them are asked."""

    rows: Sequence[Row]
    kept: Int64Array
    """int64 [P]: the rows within the limits, and within `evaluation.max_prompts`."""
    order: PromptOrder | None = None
    """The order in which the kept rows, numbered from 0, come in training; None for held-out ones."""


@frozen(kw_only=True, eq=False)
class LoopContext:
    """The loop that samples are collected for, with its backends."""

    generator: GeneratorGroup
    weights: WeightSync
    directory: Path
    """The run's."""
    sinks: Sinks
    clock: PhaseClock
    progress: Progress
    on_tokens: OnTokens | None = None


class Collector(ABC):
    """Collects the samples of a run. `close` is called when the run ends, however it does."""

    @abstractmethod
    def observe(self, rows: Sequence[Row]) -> Sequence[Observation]:
        """The prompts that the environment makes of rows. DataError where it cannot begin with one of them. Called before the
        run, and only where the environment promises that this is cheap."""

    def check(self, prompts: PromptRows) -> Iterable[str]:  # noqa: ARG002 - most have nothing to say
        """Notes on the rows to train on, before a backend is built. DataError where they cannot be trained on."""
        return ()

    @abstractmethod
    def source(self, prompts: PromptRows, loop: LoopContext) -> Source:
        """The source of the steps' samples, each a CollectedRollouts."""

    def observers(self, source: Source, held_out: PromptRows | None, loop: LoopContext) -> Iterable[LoopObserver]:  # noqa: ARG002
        """Return observers that keep the samples of a source as `[logging]` says, and that measure answers to held-out rows as
        `[evaluation]` says, where there are any. A source of demonstrations or preferences is not the collector's own."""
        return ()

    @abstractmethod
    def evaluator(
        self, held_out: PromptRows, generator: GeneratorGroup, clock: PhaseClock, progress: Progress
    ) -> Callable[[int], dict[str, float]]:
        """Return a function that measures the answers to held-out rows. Called with the version of the generator's weights, it
        returns figures named `eval/…`."""

    def close(self) -> None:  # noqa: B027 - not all hold anything
        """End what is under way, and close the environment, which nothing else does."""


def build_collector(context: CollectorContext) -> Collector:
    """Build the installed collector of a run. PluginError where there is none, or it is none."""
    entry = collector(_kind(context.plan))
    built = entry.call("collector", context)
    if not isinstance(built, Collector):
        raise PluginError(f"{entry.label} returned a {type(built).__name__}; expected a Collector")
    return built


def collector_problems(plan: RunPlan) -> tuple[Problem | Note, ...]:
    """Return what the collector of the plan's samples finds wrong with it. PluginError where none can be used."""
    return collector(_kind(plan)).check(plan) if "environment" in plan.chosen else ()


def _kind(plan: RunPlan) -> RunKind:
    if plan.replay_schedule is not None:
        return "replay"
    return "agents" if plan.runs_agents else "episodes"
