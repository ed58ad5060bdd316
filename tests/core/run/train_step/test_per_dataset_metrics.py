"""Figures of each of several data sets, by the log-probabilities that a step's updates return."""

import numpy as np
import pytest

from rlcore.run.protocols import TrainedStep
from rlcore.run.train_step.metrics import PerDatasetMetrics
from rlcore.spi import GROUP_IDS, FinishReason, RolloutBatch, TokenBatch
from rlcore.spi.arrays import offsets_of


class Algorithm:
    """The loss is minus the mean of what is learned."""

    def measure(self, examples, logprobs, reference):
        assert reference is None
        assert examples.group_ids.tolist() == sorted(examples.group_ids.tolist())
        assert len(examples.rewards) == examples.batch.num_sequences
        return {"loss": -float(logprobs[examples.batch.loss_mask].mean())}


def test_each_set_has_the_figures_of_the_rows_that_were_learned():
    """Three groups of one sequence and one of two, in updates of two groups each; the last group was in none."""
    lengths = np.array([2, 3, 2, 4, 2])
    mask = np.ones(13, bool)
    mask[[0, 2, 5, 7, 11]] = False
    columns = {GROUP_IDS: np.array([0, 1, 2, 2, 3], np.int32)}
    batch = TokenBatch(tokens=np.zeros(13, np.int32), offsets=offsets_of(lengths), loss_mask=mask, sequence_columns=columns)
    samples = RolloutBatch(
        batch=batch,
        rewards=np.zeros(5, np.float32),
        valid=np.ones(5, bool),
        finish_reasons=np.full(5, FinishReason.STOP, np.uint8),
    )
    figures = PerDatasetMetrics(algorithm=Algorithm(), sets_of={3: ["a", "b", "a", "b"]}.__getitem__)
    logprobs = -np.arange(13, dtype=np.float32)
    for sequences in ([1], [0, 2, 3]):
        is_in = np.repeat(np.isin(np.arange(5), sequences), lengths)
        figures.add(np.array(sequences), np.where(is_in, logprobs, np.float32(0)))
    step = TrainedStep(step=3, sampled=samples, scored=samples, trained=batch)
    assert figures.on_step_trained(step) == {
        "data/a/samples": 3.0,
        "data/a/loss": pytest.approx(34 / 5),
        "data/b/samples": 1.0,
        "data/b/loss": 3.5,
    }
    assert figures.on_step_trained(step) == {"data/a/samples": 0.0, "data/b/samples": 0.0}, "each step begins with no update"
