"""Shared by the tests of GRPO: packed batches as a loss receives them."""

import numpy as np
import pytest
import torch

from rlcore.spi import (
    ADVANTAGES,
    GENERATION_LOGPROBS,
    PREVIOUS_LOGPROBS,
    REFERENCE_LOGPROBS,
    GlobalCounts,
    LossInputs,
    TokenBatch,
)
from rlcore_torchkit.rl.covariance import HIGH_COVARIANCE
from rlcore_torchkit.rl.shaping import LIKELIHOOD_WEIGHTS


@pytest.fixture(scope="session")
def make_batch():
    """make_batch(seed, lengths) -> (TokenBatch, logprobs [T], entropy [T]): random columns, prompts of one token or more."""

    def make(seed, lengths):
        random = np.random.default_rng(seed)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        size = int(offsets[-1])
        mask = random.random(size) < 0.7
        mask[offsets[:-1]] = False
        generation = np.where(mask, -random.exponential(1.5, size), 0.0)

        def near(spread):
            return np.where(mask, generation + random.normal(0, spread, size), 0.0).astype(np.float32)

        chosen = mask & np.repeat(np.arange(len(lengths)) % 3 == 1, lengths)
        columns = {
            GENERATION_LOGPROBS: generation.astype(np.float32),
            PREVIOUS_LOGPROBS: near(0.5),
            REFERENCE_LOGPROBS: near(0.8),
            HIGH_COVARIANCE: (mask & (np.arange(size) % 3 == 0)).astype(np.float32),
            LIKELIHOOD_WEIGHTS: np.where(chosen, mask.sum() / max(chosen.sum(), 1), 0.0).astype(np.float32),
            ADVANTAGES: np.where(mask, np.repeat(random.normal(0, 1.5, len(lengths)), lengths), 0.0).astype(np.float32),
        }
        batch = TokenBatch(tokens=np.zeros(size, np.int32), offsets=offsets, loss_mask=mask, token_columns=columns)
        return (
            batch,
            (generation + random.normal(0, 0.5, size)).astype(np.float32),
            random.exponential(1.0, size).astype(np.float32),
        )

    return make


@pytest.fixture(scope="session")
def make_inputs():
    """make_inputs(batch, logprobs, entropy, counts=None, dtype=float64, without=()) -> LossInputs whose logprobs are a leaf."""

    def make(batch, logprobs, entropy, counts: GlobalCounts | None = None, dtype=torch.float64, without=()):
        columns = {
            name: torch.tensor(column, dtype=dtype) for name, column in batch.token_columns.items() if name not in without
        }
        current = torch.tensor(logprobs, dtype=dtype, requires_grad=True)
        return LossInputs(
            logprobs=current,
            previous_logprobs=columns.pop(PREVIOUS_LOGPROBS, current).detach(),
            entropy=None if entropy is None else torch.tensor(entropy, dtype=dtype, requires_grad=True),
            loss_mask=torch.tensor(batch.loss_mask),
            offsets=torch.tensor(batch.offsets),
            token_columns=columns,
            sequence_columns={},
            counts=counts or batch.counts(),
        )

    return make
