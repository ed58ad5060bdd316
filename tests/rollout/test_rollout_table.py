"""Samples as a table: advantages beside the tokens that they are of."""

import numpy as np
from attrs import evolve

from rlcore.spi import ADVANTAGES, TokenBatch
from rlcore_rollout.rollout_table import advantages_of


class Collected:
    """As much of a step's samples as is looked at."""

    def __init__(self, batch: TokenBatch) -> None:
        self.batch = batch


def batch(offsets: list[int]) -> TokenBatch:
    num_tokens = offsets[-1]
    return TokenBatch(
        tokens=np.zeros(num_tokens, np.int32), offsets=np.array(offsets, np.int64), loss_mask=np.zeros(num_tokens, np.bool_)
    )


def test_advantages_are_those_of_the_batch_where_it_has_the_same_sequences() -> None:
    sampled = batch([0, 2, 5])
    advantages = np.arange(5, dtype=np.float32)
    trained = evolve(sampled, token_columns={ADVANTAGES: advantages})
    collected = Collected(sampled)
    found = advantages_of(collected, trained)  # type: ignore[arg-type]
    assert found is not None
    np.testing.assert_array_equal(found, advantages)
    assert advantages_of(collected, sampled) is None  # type: ignore[arg-type]
    other = evolve(batch([0, 3, 5]), token_columns={ADVANTAGES: advantages})
    assert advantages_of(collected, other) is None  # type: ignore[arg-type]
