"""Pieces between processes, by gloo."""

import torch

from rlcore_torchkit.refit.digest import tensor_digest
from rlcore_torchkit.refit.shard_transfer import make_bucket_list
from rlcore_torchkit.testing.ranks import free_address, launch

from .shard_transfer_ranks import CASES, NUM_RECEIVERS, NUM_SENDERS, run_rank  # type: ignore[import-not-found]
from .test_shard_plan import SPEC, WHOLE, plan_pieces, rows  # type: ignore[import-not-found]


def test_eight_ranks_to_four_in_every_pair_of_layouts() -> None:
    assert len(CASES) == 9
    launch(run_rank, (free_address(), free_address()), NUM_SENDERS + NUM_RECEIVERS)


def test_a_bucket_that_changed_is_not_taken() -> None:
    [bucket] = make_bucket_list(plan_pieces((SPEC,), [[WHOLE]], [[rows(2, 5)]], 10**6), 10**6)
    values, dtypes = torch.randn(8, 6).bfloat16(), {"w": torch.bfloat16}
    buffer = bucket.packed(dtypes, lambda piece: values[piece.box.within(piece.held)], torch.device("cpu"))
    digest = tensor_digest(buffer[:-8])
    buffer[-8:] = torch.tensor([digest - 2**64 if digest >= 2**63 else digest]).view(torch.uint8)
    taken = torch.zeros(3, 6).bfloat16()
    assert bucket.unpacked(buffer, dtypes, {rows(2, 5): taken}) == digest
    assert torch.equal(taken, values[2:5])
    for place in (0, len(buffer) - 1):
        wrong = buffer.clone()
        wrong[place] ^= 1
        untouched = torch.zeros(3, 6).bfloat16()
        assert bucket.unpacked(wrong, dtypes, {rows(2, 5): untouched}) is None
        assert not untouched.any()
