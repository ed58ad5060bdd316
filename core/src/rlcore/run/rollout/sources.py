"""Where a step's samples come from, and how the held-out set is measured."""

from collections.abc import Sequence

from attrs import frozen

from rlcore.run.data.datasets import PromptStream
from rlcore.run.data.prompts import Demonstrations, demonstration_batch
from rlcore.run.data.seeds import Stream
from rlcore.run.rollout.collector import CollectedRollouts, RolloutCollector
from rlcore.run.rollout.metrics import evaluation_metrics
from rlcore.spi import RolloutBatch, Row
from rlcore.spi.arrays import Int64Array


@frozen(kw_only=True, eq=False)
class RolloutSource:
    """Rewarded samples of the present policy."""

    collector: RolloutCollector
    rows: Sequence[Row]
    kept: Int64Array
    """int64 [P]: the rows within the limits."""
    stream: PromptStream
    seed: int

    def sample(self, step: int, weight_version: int) -> CollectedRollouts:
        """The samples of step `step`, counted from 1: determined by seed, step and weights."""
        rows = [self.rows[int(index)] for index in self.kept[self.stream.indices(step - 1)]]
        return self.collector.collect(rows, weight_version, seed=(self.seed, Stream.ROLLOUTS, step))


@frozen(kw_only=True, eq=False)
class DemonstrationSource:
    """Source of batches from prompt/completion pairs."""

    demonstrations: Demonstrations
    stream: PromptStream

    def sample(self, step: int, weight_version: int) -> RolloutBatch:  # noqa: ARG002 - no policy is asked
        """The demonstrations of step `step`, counted from 1."""
        return demonstration_batch(self.demonstrations, self.stream.indices(step - 1))


@frozen(kw_only=True, eq=False)
class HeldOutEvaluator:
    """pass@1 on the held-out rows; the same draws at every evaluation, so that curves differ by the weights alone."""

    collector: RolloutCollector
    rows: Sequence[Row]
    kept: Int64Array
    """int64 [P]: the rows within the limits."""
    seed: int

    def evaluate(self, weight_version: int) -> dict[str, float]:
        """Return the metrics of an evaluation, named `evaluation/…`."""
        rows = [self.rows[int(index)] for index in self.kept]
        collected = self.collector.collect(rows, weight_version, seed=(self.seed, Stream.EVALUATION))
        return evaluation_metrics(collected)
