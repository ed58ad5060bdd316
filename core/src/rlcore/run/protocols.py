"""Records between the parts of a run: a step's samples, and the position of the loop."""

from collections.abc import Mapping, Sequence

from attrs import define, field, frozen

from rlcore import spi
from rlcore.registry.algorithm_handle import AlgorithmState
from rlcore.spi.arrays import BoolArray, Int64Array


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
    environment_metrics: Mapping[str, float] = field(factory=dict)
    """Means over the turns that report them, of valid episodes."""
    schedule_metrics: Mapping[str, float] = field(factory=dict)
    """How old the samples are, and what became of others, where steps overlap."""
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
    """What the algorithm kept when `step` was done; None where it keeps nothing. Its own is ahead of that within a step."""
    saved_step: int = -1
    """Step of the newest checkpoint that this process wrote or read; -1 where there is none."""

    @property
    def is_whole(self) -> bool:
        """Whether no step is half done."""
        return (self.weight_version, self.critic_version) == (self.step_version, self.step_critic_version)
