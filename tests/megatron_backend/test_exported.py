"""Who sends a tensor of the export, and how much of it."""

from rlcore_megatron.families.weight_source import HfTensor, Source
from rlcore_megatron.weights.shards import Exported

QUERY, KEY = (HfTensor(name=name, shape=(rows, 4), tp_dim=0) for name, rows in (("query", 8), ("key", 2)))
SOURCE = Source(parameter="qkv", tensors=(QUERY, KEY), groups=1)


def exported(index: int, **changes) -> Exported:
    content = {"tensor": SOURCE.tensors[index], "source": SOURCE, "index": index, "stage": 1, "expert_rank": None}
    return Exported(**content | {"parameter": None} | changes)


def test_ranks_that_share_a_group_send_as_much_as_the_one_that_has_most():
    assert exported(0).sent_shape(2) == (5, 4)
    assert exported(1).sent_shape(2) == (2, 4)


def test_tensors_of_another_stage_expert_or_dtype_travel_apart():
    bias = HfTensor(name="bias", shape=(8,), dtype="float32")
    others = (exported(0, stage=0), exported(0, expert_rank=1), exported(0, tensor=bias))
    assert exported(0).sender == exported(1).sender
    assert len({exported(0).sender, *(other.sender for other in others)}) == 4
