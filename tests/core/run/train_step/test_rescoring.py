"""Tokens of weights beyond the bound get the trainer's log-probabilities."""

from typing import Any

import numpy as np

from rlcore.run.protocols import CollectedRollouts, LoopPosition
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import PhaseClock
from rlcore.run.train_step.scorers import Rescorer
from rlcore.spi import GENERATION_LOGPROBS, GROUP_IDS, WEIGHT_VERSIONS, TokenBatch

VERSIONS = np.array([-1, 2, 4, -1, 5, 5, -1, 3], np.int32)


class Trainer:
    """Its log-probabilities are -10 times the position."""

    def logprobs(self, batch: TokenBatch, sequences: Any, model: str, weight_version: int) -> Any:
        self.asked = (sequences.tolist(), model, weight_version)
        values = -10.0 * np.arange(batch.num_tokens, dtype=np.float32)
        is_asked = np.repeat(np.isin(np.arange(batch.num_sequences), sequences), batch.lengths)
        return np.where(is_asked, values, np.float32(0.0))


def samples(oldest_version: int) -> CollectedRollouts:
    return CollectedRollouts(
        batch=TokenBatch(
            tokens=np.arange(8, dtype=np.int32),
            offsets=np.array([0, 3, 6, 8]),
            loss_mask=VERSIONS >= 0,
            token_columns={GENERATION_LOGPROBS: np.full(8, -1.0, np.float32), WEIGHT_VERSIONS: VERSIONS},
            sequence_columns={GROUP_IDS: np.zeros(3, np.int32)},
        ),
        rewards=np.zeros(3, np.float32),
        valid=np.ones(3, np.bool_),
        finish_reasons=np.zeros(3, np.uint8),
        success=np.zeros(3, np.bool_),
        responses=["", "", ""],
        num_generated=np.array([2, 2, 1]),
        failed=np.zeros(3, np.bool_),
        truncated=np.zeros(3, np.bool_),
        timed_out=np.zeros(3, np.bool_),
        weight_version=6,
        oldest_version=oldest_version,
    )


def test_old_tokens_alone_get_the_trainers_log_probabilities() -> None:
    trainer: Any = Trainer()
    found: Any = Rescorer(trainer=trainer, clock=PhaseClock(Progress())).score(samples(4), LoopPosition())
    assert trainer.asked == ([0, 2], "policy", 6)
    assert found.batch.token_columns[GENERATION_LOGPROBS].tolist() == [-1, -10, -1, -1, -1, -1, -1, -70]
    assert found.batch.token_columns[WEIGHT_VERSIONS].tolist() == VERSIONS.tolist(), "of what says how far the two agree"
    assert found.schedule_metrics == {"async/tokens_rescored": 2.0}


def test_without_old_tokens_the_trainer_is_not_asked() -> None:
    trainer: Any = None
    found: Any = Rescorer(trainer=trainer, clock=PhaseClock(Progress())).score(samples(2), LoopPosition())
    assert found.batch.token_columns[GENERATION_LOGPROBS].tolist() == [-1.0] * 8
    assert found.schedule_metrics == {"async/tokens_rescored": 0.0}
