"""Log-probabilities in rollouts of an algorithm whose teacher reads other prompts."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlcore.run.protocols import LoopPosition
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import PhaseClock
from rlcore.run.train_step.scorers import Reference, scorers_of
from rlcore.spi import GROUP_IDS, PREVIOUS_LOGPROBS, REFERENCE_LOGPROBS, AlgorithmNeeds, RolloutBatch, TokenBatch

OWN = TokenBatch(
    tokens=np.array([1, 2, 3, 1, 4], np.int32),
    offsets=np.array([0, 3, 5]),
    loss_mask=np.array([False, True, True, False, True]),
    sequence_columns={GROUP_IDS: np.zeros(2, np.int32)},
)
TEACHERS = TokenBatch(
    tokens=np.array([9, 9, 1, 2, 3, 9, 1, 4], np.int32),
    offsets=np.array([0, 5, 8]),
    loss_mask=np.array([False, False, False, True, True, False, False, True]),
)


class Trainer:
    """Its log-probabilities are the place of a token among all, negated, and 100 more for the reference."""

    def logprobs(self, batch: TokenBatch, sequences: Any, model: str, weight_version: int) -> Any:
        assert (sequences.tolist(), weight_version) == ([0, 1], 3)
        return -np.arange(batch.num_tokens, dtype=np.float32) - (100 if model == "reference" else 0)


@pytest.mark.parametrize(
    ("batch", "expected"), [(OWN, [0, -1, -2, -3, -4]), (TEACHERS, [0, -3, -4, 0, -7])], ids=["own", "teacher"]
)
def test_each_loss_token_gets_that_of_its_own_place_behind_the_teachers_prompt(batch: TokenBatch, expected: list[int]) -> None:
    needs = AlgorithmNeeds(
        source="rollouts", reference_logprobs=True, reference_logprobs_in_rollouts=True, policy_logprobs_in_rollouts=True
    )
    algorithm: Any = SimpleNamespace(needs=needs, teacher_batch=lambda rollouts: rollouts.batch if batch is OWN else batch)
    trainer: Any = Trainer()
    samples = RolloutBatch(
        batch=OWN, rewards=np.zeros(2, np.float32), valid=np.ones(2, np.bool_), finish_reasons=np.zeros(2, np.uint8)
    )
    reference = Reference(group=trainer, is_apart=False)
    for scorer in scorers_of(algorithm, reference, trainer, PhaseClock(Progress())):
        samples = scorer.score(samples, LoopPosition(weight_version=3))
    columns, mask = samples.batch.token_columns, OWN.loss_mask
    assert columns[PREVIOUS_LOGPROBS].tolist() == expected
    assert columns[REFERENCE_LOGPROBS][mask].tolist() == [value - 100 for value in np.array(expected)[mask].tolist()]
    assert columns[REFERENCE_LOGPROBS].dtype == np.float32
