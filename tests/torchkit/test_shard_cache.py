"""Copies of parts, and the version that they are of."""

import pytest
import torch

from rlcore.spi import ShardSlice, TensorSpec
from rlcore_torchkit.refit.shard_cache import NOTHING, ShardCache
from rlcore_torchkit.refit.shard_route import whole_slice

CPU = torch.device("cpu")
SPEC = TensorSpec(name="w", shape=(3,), dtype="bfloat16")
BOX = whole_slice(SPEC)


def test_a_version_counts_once_it_is_whole() -> None:
    kept = ShardCache(CPU)
    assert kept.version == NOTHING
    with kept.changing(4):
        assert kept.version == NOTHING
    assert kept.version == 4
    with pytest.raises(ZeroDivisionError), kept.changing(5):
        raise ZeroDivisionError
    assert kept.version == NOTHING


def test_copies_of_other_parts_are_of_no_version() -> None:
    kept, other = ShardCache(CPU), ShardSlice("w", (0,), (2,))
    with kept.changing(4):
        kept.put({BOX: torch.ones(3)}, [SPEC])
    kept.require([BOX])
    assert (kept.version, [*kept.tensors]) == (4, [BOX])
    kept.require([BOX, other])
    assert (kept.version, kept.tensors) == (NOTHING, {})


def test_a_copy_is_of_the_tensors_own_dtype() -> None:
    kept, part = ShardCache(CPU), torch.tensor([1.0, 2.0, 3.0001])
    kept.put({BOX: part}, [SPEC])
    part.zero_()
    assert kept.tensors[BOX].tolist() == [1.0, 2.0, 3.0]
    assert kept.tensors[BOX].dtype == torch.bfloat16


def test_on_its_own_device_the_copy_itself_is_given_out() -> None:
    kept = ShardCache(CPU)
    given = kept.on(CPU, SPEC, BOX)
    given.fill_(5.0)
    kept.take_back({BOX: given})
    assert kept.on(CPU, SPEC, BOX) is given


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_host_nan_has_the_bits_that_the_device_sends() -> None:
    kept = ShardCache(CPU)
    part = torch.tensor([0x7F800001, 0x7FC00000, -1], dtype=torch.int64).to(torch.int32).view(torch.float32).cuda()
    kept.put({BOX: part}, [SPEC])
    sent = part.to(torch.bfloat16).cpu()
    assert torch.equal(kept.tensors[BOX].view(torch.int16), sent.view(torch.int16))
