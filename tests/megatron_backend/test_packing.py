"""A rank's share of a packed microbatch, from every context rank's place in turn."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fake_ranks import on_rank
from megatron_support import even_batch, make_batch

from rlcore.spi import ROUTED_EXPERTS
from rlcore_megatron.modules.packing import ForwardOptions, PackedBatch, empty_like, pack
from rlcore_torchkit.trainer.microbatch import move

CPU = torch.device("cpu")
WANTED = ForwardOptions(temperature=1.0, entropy="none")


@pytest.fixture
def batch():
    """With experts of 3 layers, 2 of each token."""
    batch = make_batch()
    experts = np.random.default_rng(0).integers(0, 9, (batch.num_tokens, 3, 2)).astype(np.int16)
    return batch.with_token_column(ROUTED_EXPERTS, experts)


def shares(batch, num_ranks, multiple, **options) -> list[PackedBatch]:
    found = []
    for rank in range(num_ranks):
        with on_rank(rank, num_ranks):
            found.append(pack(move(batch, CPU, ()), dist.group.WORLD, multiple, WANTED, **options))
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("multiple", [1, 4])
def test_the_ranks_shares_are_the_microbatch_and_padding(num_ranks, multiple, batch):
    parts = shares(batch, num_ranks, multiple)
    assert len({part.tokens.shape for part in parts}) == 1
    assert parts[0].tokens.shape[1] % multiple == 0
    size = batch.num_tokens
    assert torch.cat([part.tokens for part in parts], 1)[0, :size].tolist() == batch.tokens.tolist()
    positions = np.concatenate([np.arange(length) for length in batch.lengths])
    assert torch.cat([part.positions for part in parts])[:size].tolist() == positions.tolist()
    sequences = torch.cat([part.sequences for part in parts])
    assert sequences[:size].tolist() == np.repeat(np.arange(batch.num_sequences), batch.lengths).tolist()
    assert (sequences[size:] == -1).all()
    routed = torch.cat([part.routed for part in parts], 2).permute(2, 0, 1)
    assert torch.equal(routed[:size], torch.from_numpy(batch.token_columns[ROUTED_EXPERTS]))
    assert (routed[size:] == -1).all(), "padding goes where the router sends it"


def test_without_a_routing_routers_choose(batch):
    assert shares(make_batch(), 1, 1)[0].routed is None


def test_a_filler_has_no_sequences_and_nothing_that_a_loss_reads(batch):
    filler = empty_like(move(batch, CPU, ("advantages",)))
    assert (filler.packed.num_tokens, filler.packed.num_sequences) == (2, 1)
    assert filler.tokens.tolist() == [0, 0]
    assert filler.token_columns == {}
    (part,) = shares(even_batch(0), 1, 1, is_filler=True)
    assert (part.sequences == -1).all()
