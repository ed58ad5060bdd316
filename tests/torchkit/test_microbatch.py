"""A microbatch on the device: what is copied, what is left behind, what is missing."""

import numpy as np
import pytest
import torch

from rlcore.spi import ROUTED_EXPERTS, ContractError, TokenBatch
from rlcore_torchkit.trainer.microbatch import move

CPU = torch.device("cpu")


@pytest.fixture
def batch():
    return TokenBatch(
        tokens=np.array([5, 6, 7, 8], np.int32),
        offsets=np.array([0, 3, 4], np.int64),
        loss_mask=np.array([False, True, True, False]),
        token_columns={"advantages": np.array([0.0, 1.0, 2.0, 0.0], np.float32), "unread": np.zeros(4, np.float32)},
        sequence_columns={"weights": np.array([0.5, 1.5], np.float32)},
    )


def test_what_is_read_is_there_with_its_dtype(batch):
    found = move(batch, CPU, ("advantages",))
    assert (found.tokens.tolist(), found.tokens.dtype) == ([5, 6, 7, 8], torch.int32)
    assert (found.offsets.tolist(), found.offsets.dtype) == ([0, 3, 4], torch.int64)
    assert (found.loss_mask.tolist(), found.loss_mask.dtype) == ([False, True, True, False], torch.bool)
    assert {name: column.tolist() for name, column in found.token_columns.items()} == {"advantages": [0.0, 1.0, 2.0, 0.0]}
    assert {name: column.tolist() for name, column in found.sequence_columns.items()} == {"weights": [0.5, 1.5]}
    assert (found.packed.num_tokens, found.packed.num_sequences) == (4, 2)
    assert found.packed.predicting.tolist() == [0, 1]


def test_a_routing_comes_along_unasked(batch):
    routed = batch.with_token_column(ROUTED_EXPERTS, np.full((4, 2, 1), 3, np.int16))
    found = move(routed, CPU, ())
    assert found.token_columns.keys() == {ROUTED_EXPERTS}
    assert found.token_columns[ROUTED_EXPERTS].shape == (4, 2, 1)
    assert found.token_columns[ROUTED_EXPERTS].dtype == torch.int16


def test_a_loss_cannot_reach_the_drivers_data(batch):
    batch.tokens.setflags(write=False)
    found = move(batch, CPU, ("advantages",))
    for tensor in (found.tokens, found.offsets, found.loss_mask, *found.token_columns.values()):
        tensor.zero_()
    assert batch.tokens.tolist() == [5, 6, 7, 8]
    assert batch.offsets.tolist() == [0, 3, 4]
    assert batch.loss_mask.any()
    assert batch.token_columns["advantages"].any()


def test_a_column_that_is_missing_is_named(batch):
    with pytest.raises(ContractError, match=r"\['advantages', 'unread'\]; .* \['values'\]"):
        move(batch, CPU, ("advantages", "values"))
