"""The parts of the loop as it sees them, the events that its observers follow, and the records between these."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from attrs import define, field, frozen

from rlcore import spi
from rlcore.registry.algorithm_handle import AlgorithmState
from rlcore.run.interrupt import InterruptGuard
from rlcore.spi.arrays import BoolArray, Int64Array
from rlcore.spi.execution import Backends, Minibatch

ResultT = TypeVar("ResultT")


@frozen(kw_only=True, eq=False)
class CollectedRollouts(spi.RolloutBatch):
    """A step's samples, with what the run directory and the metrics tell of them besides."""

    success: BoolArray
    """bool [N]: whether the environment called the task solved; False where it failed."""
    responses: Sequence[str]
    """[N]: the text of all turns of the policy."""
    num_generated: Int64Array
    """int64 [N]: tokens that the policy generated."""
    failed: BoolArray
    """bool [N]: whether the environment failed, or the episode took too long."""
    timed_out: BoolArray
    """bool [N]: whether the episode took too long."""
    truncated: BoolArray
    """bool [N]: whether a limit of tokens or turns cut it off."""
    failures: Sequence[spi.EpisodeFailure | None] = ()
    """[E]: how each episode ended, None where by the policy; empty where nobody knows."""
    environment_metrics: Mapping[str, float] = field(factory=dict)
    """Means over the turns that report them, of valid episodes."""
    schedule_metrics: Mapping[str, float] = field(factory=dict)
    """How old the samples are, and what became of others, where steps overlap."""
    reset_seeds: Sequence[int] = ()
    """[G]: the seed with which the environment began each group."""
    data_sets: Sequence[str] = ()
    """[G]: the data set of each group; none where there is only one."""
    oldest_version: int = 0
    """Tokens of older weights are to get the trainer's log-probabilities in place of the generator's."""

    def older_than(self, version: int) -> BoolArray:
        """bool [T]: the loss tokens of weights older than a version."""
        return self.batch.loss_mask & (self.batch.token_columns[spi.WEIGHT_VERSIONS] < version)


@define(kw_only=True, eq=False)
class LoopPosition:
    """The position of the loop."""

    step: int = 0
    """The number of steps that are done."""
    weight_version: int = 0
    """Optimizer steps done: the version the trainer holds."""
    critic_version: int = 0
    """Optimizer steps of the critic that are done: the version that it holds."""
    step_critic_version: int = 0
    """The critic's version that `step` ended with."""
    step_version: int = 0
    """The version that `step` ended with: behind weight_version while updates of the next step are done."""
    unlogged: dict[str, float] | None = None
    """Metrics of `step` while its evaluation and its line in metrics.jsonl are still to come."""
    algorithm_state: AlgorithmState | None = None
    """The algorithm's state when `step` was done; None where it keeps none. Its own is ahead of that within a step."""
    saved_step: int = -1
    """Step of the newest checkpoint that this process wrote or read; -1 where there is none."""

    @property
    def is_whole(self) -> bool:
        """Return whether no step is half done."""
        return (self.weight_version, self.critic_version) == (self.step_version, self.step_critic_version)

    def count_step(self) -> None:
        """The updates of the next step are made."""
        self.step += 1
        self.step_version, self.step_critic_version = self.weight_version, self.critic_version


class Scorer(Protocol):
    """Adds to a step's samples what the algorithm reads besides them."""

    def score(self, samples: spi.RolloutBatch, position: LoopPosition) -> spi.RolloutBatch:
        """The samples with further columns."""


class Learner(Protocol):
    """A model that a step trains."""

    def train(
        self, step: int, minibatches: Sequence[Minibatch], training: spi.TrainingBatch, position: LoopPosition
    ) -> Mapping[str, float]:
        """Make the updates of a step and move the position's version on; figures of them."""


class Saver(Protocol):
    """Keeps a run's position on disk."""

    @property
    def can_save(self) -> bool:
        """Return whether all that a checkpoint holds is in a known state."""

    def save(self, position: LoopPosition, rollouts: bytes | None, *, prune: bool) -> None:
        """Write a checkpoint of a position and of what is under way there; `prune` drops the oldest. It counts once it is
        complete, and `completed` is called before the next."""

    def completed(self, *, wait: bool) -> int | None:
        """Return the step of a checkpoint that is complete since the last call; None where there is none. Raise what made one
        fail."""

    def export_to(self, final: Path, kind: Literal["hf", "peft"] = "hf") -> Path:
        """Write the model in the Hugging Face format, or its adapters in PEFT's, as this directory."""


def always() -> bool:
    """Return True: nothing interrupts the work."""
    return True


class Source(ABC):
    """Provides the samples of each step."""

    generates: bool = False
    """True where the generator makes the next samples, so that it needs the new weights after each step."""

    @abstractmethod
    def sample(self, step: int, weight_version: int, may_go_on: Callable[[], bool] = always) -> spi.RolloutBatch | None:
        """Return the samples of step `step`, counted from 1; None where `may_go_on` turned False before they were complete."""

    @contextmanager
    def interruptible(self, guard: InterruptGuard) -> Iterator[Callable[[], bool]]:  # noqa: ARG002 - a signal ends it at once
        """A block around `sample`, with its `may_go_on`. By default a signal ends the block at once."""
        yield always

    def begin(self, step: int, saved: bytes | None) -> None:  # noqa: B027 - most follow from the step alone
        """Begin behind `step`, from what `state` returned then."""

    def trained(self) -> None:  # noqa: B027 - likewise
        """The last samples were trained on."""

    def pause(self) -> None:  # noqa: B027 - only what overlaps with training goes on by itself
        """Stop generating in the background until the next `sample`. Raises an error of the background's."""

    @property
    def has_failed(self) -> bool:
        """Return whether the next `sample` raises an error: the generator's weights may be invalid."""
        return False

    def generating_s(self) -> float | None:
        """Return the seconds of generation since the last `sample`; None where they are unknown or nothing generates."""
        return None

    @contextmanager
    def still(self) -> Iterator[None]:
        """Make no call of the environment within the block."""
        yield

    def make_way(self) -> None:  # noqa: B027 - likewise
        """Pause before the weights change, unless the generator takes them in flight."""

    def state(self) -> bytes | None:
        """Return the paused source's state for a checkpoint; None where the step number determines everything."""
        return None

    def close(self) -> None:  # noqa: B027 - likewise
        """End all work."""


@frozen(kw_only=True, eq=False)
class TrainedStep:
    """The data of a step that trains."""

    step: int
    sampled: spi.RolloutBatch
    """The samples as they came."""
    scored: spi.RolloutBatch
    """The samples with the columns that the algorithm reads."""
    trained: spi.TokenBatch
    """The training batch that the algorithm made of them."""


class LoopObserver:
    """Follows a run: each method is an event of the loop, in the driver's thread. An observer overrides those that it needs.

    An error that an event raises ends the run, as an error of the loop does.
    """

    def on_backends(self, backends: Backends) -> Backends:
        """The backends of the run are open. Return them, or groups around them; workers that start anew repeat the event."""
        return backends

    def on_start(self, step: int) -> None:
        """The loop starts after `step`, which is above 0 for a resumed run."""

    def on_measure(self, step: int, weight_version: int) -> Mapping[str, float]:  # noqa: ARG002 - most measure nothing
        """Return metrics of the weights after `step`, for the step's line of metrics; called at 0 too."""
        return {}

    def on_batch(self, step: TrainedStep) -> None:
        """The batch of a step is made, and the trainer is where it trains; its updates follow."""

    def on_step_trained(self, step: TrainedStep) -> Mapping[str, float]:  # noqa: ARG002 - likewise
        """The updates of a step are made, and the step does not count yet. Return metrics of it."""
        return {}

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step are complete."""

    reads_checkpoints: bool = False
    """True where `on_checkpoint_saved` reads the checkpoint's files, which have to be complete then."""

    def on_checkpoint_saved(self, step: int, export: Callable[..., Path]) -> None:
        """The checkpoint of `step` is written. A run that is resumed from it repeats the event, once or twice.

        `export(directory)` writes the model in the Hugging Face format, `export(directory, "peft")` its adapters in PEFT's, and
        returns the directory. No interrupt ends this event."""

    def on_idle(self) -> None:
        """No step is running: the observer may wait; an interrupt ends the wait."""

    def on_last_step(self) -> None:
        """The last step is done: the observer may wait, as in `on_idle`."""

    def on_close(self) -> None:
        """The loop is over, by its last step or an error: end all work."""

    def on_export(self, summary: Mapping[str, object]) -> None:
        """The model is exported, `summary` is in summary.json, and the sinks are closed. After an error a resumed run repeats
        the event."""

    def on_complete(self, summary: Mapping[str, object]) -> None:
        """The run is complete, and stays so after an error of this event."""


@frozen(kw_only=True, eq=False)
class MetricsTo(LoopObserver):
    """Hands the metrics of each step to a function: a file, a tracker or a display."""

    write: Callable[[int, Mapping[str, float]], None]

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See LoopObserver."""
        self.write(step, metrics)


def nothing() -> None:
    """Do nothing."""


class WeightSync:
    """Moves weights and memory between trainer and generator. This base class is for runs without a generator."""

    def to_training(self) -> None:
        """Move trainer and generator to where the trainer can work."""

    def make_room_to_save(self) -> None:
        """Load trainer and critic back onto the device, since saving reads them."""

    def forget(self) -> None:
        """Mark the generator's weights as invalid, such as after an error."""

    def refit(self, weight_version: int, *, before_change: Callable[[], None] = nothing) -> None:
        """Bring the generator to these weights. If it holds others, call `before_change` first."""

    def generating(
        self,
        generate: Callable[[], ResultT],
        weight_version: int,  # noqa: ARG002 - no generator has weights
        *,
        before_change: Callable[[], None] = nothing,  # noqa: ARG002 - likewise
    ) -> ResultT:
        """Return the result of `generate` with the generator at these weights."""
        return generate()

    def take_metrics(self) -> dict[str, float]:
        """Figures of memory and refits since they were taken last."""
        return {}
