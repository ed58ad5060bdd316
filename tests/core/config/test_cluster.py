"""What follows from the section of a cluster."""

from rlcore.spi import ClusterConfig


def test_the_trainers_ranks_are_the_gpus_that_do_not_only_generate() -> None:
    shared = ClusterConfig(nodes=3, gpus_per_node=8)
    assert (shared.ranks_per_node, shared.world_size) == (8, 24)
    separate = ClusterConfig(nodes=3, gpus_per_node=8, placement="separate", generator_gpus_per_node=2)
    assert (separate.ranks_per_node, separate.world_size) == (6, 18)
    apart = ClusterConfig(nodes=3, gpus_per_node=8, reference_gpus_per_node=2)
    assert (apart.ranks_per_node, apart.num_reference_ranks) == (6, 6)
