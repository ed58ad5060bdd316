"""The column of chosen tokens, on its way from the rollouts to the loss."""

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import ADVANTAGES, GENERATION_LOGPROBS
from rlcore_grpo.config import GrpoConfig
from rlcore_torchkit.rl.covariance import HIGH_COVARIANCE

from .grpo_rollouts import make_grpo, of_lengths

KL_COV = GrpoConfig(objective="kl_cov", covariance_share=0.2)
CLIP_COV = GrpoConfig(objective="clip_cov", covariance_share=0.2, covariance_minimum=0.05, covariance_maximum=2.0)


@pytest.fixture(scope="module")
def rollouts():
    return of_lengths([1, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1], [7, 3, 9, 5, 8, 6])


def products(batch):
    """float64 of the loss tokens: (log π - its mean)(A - its mean), arXiv:2505.22617."""
    logs, advantages = (np.float64(batch.token_columns[name][batch.loss_mask]) for name in (GENERATION_LOGPROBS, ADVANTAGES))
    return (logs - logs.mean()) * (advantages - advantages.mean())


def test_kl_cov_chooses_the_greatest_share_of_the_step(rollouts):
    training = make_grpo(KL_COV).build_batch(rollouts)
    column, mask = training.batch.token_columns[HIGH_COVARIANCE], training.batch.loss_mask
    assert HIGH_COVARIANCE in training.loss.token_columns
    assert column.dtype == np.float32
    assert not column[~mask].any()
    chosen, values = column[mask] > 0, products(training.batch)
    assert chosen.sum() == int(0.2 * mask.sum())
    assert values[chosen].min() > values[~chosen].max()


def test_clip_cov_draws_between_the_bounds_and_anew_each_step(rollouts):
    grpo = make_grpo(CLIP_COV)
    columns = []
    for version in (3, 3, 4):
        batch = grpo.build_batch(evolve(rollouts, weight_version=version)).batch
        columns.append(batch.token_columns[HIGH_COVARIANCE])
        values = products(batch)[columns[-1][batch.loss_mask] > 0]
        assert len(values) > 2
        assert ((values >= 0.05) & (values <= 2.0)).all()
    np.testing.assert_array_equal(columns[0], columns[1])
    assert (columns[0] != columns[2]).any()


def test_a_penalty_may_move_samples_without_an_advantage(rollouts):
    assert make_grpo(KL_COV).build_batch(rollouts).has_signal is None
    assert make_grpo(CLIP_COV).build_batch(rollouts).has_signal is not None
    assert HIGH_COVARIANCE not in make_grpo().build_batch(rollouts).batch.token_columns
