"""Numbering and division of the trainer's ranks: replicate x shard x context x tensor, and the meshes made from it."""

from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from rlcore.spi import TrainerLayout
from rlcore_fsdp2.config import Fsdp2Config
from rlcore_torchkit.distributed.rank_grid import RankGrid

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@frozen(kw_only=True)
class ParallelLayout(RankGrid):
    """The sizes of the dimensions, of which `tensor` varies fastest as ranks count up, then `context`, `shard`, `replicate`.

    Ranks that differ in `tensor` or `context` alone receive the same microbatches and are one data-parallel rank. Weights are
    sharded by FSDP over shard · context ranks, since context ranks hold the same weights. Expert parallelism groups `expert`
    neighbours among these.
    """

    replicate: int = 1
    """Groups of ranks that hold the same shards (hybrid sharding)."""
    shard: int = 1
    """Data-parallel ranks over which FSDP shards."""
    expert: int = 1
    """Ranks among shard · context that share the experts of a layer."""

    @classmethod
    def of(cls, config: Fsdp2Config, rank: int, world_size: int) -> "ParallelLayout":
        """The layout of a configuration that `check` found nothing wrong with: `shard` is what the other sizes leave."""
        others = config.replicate * config.context_parallel * config.tensor_parallel
        return cls(
            rank=rank,
            replicate=config.replicate,
            shard=world_size // others,
            context=config.context_parallel,
            tensor=config.tensor_parallel,
            expert=config.expert_parallel,
            sequence_parallel=config.sequence_parallel,
        )

    @property
    def world_size(self) -> int:
        return self.replicate * self.shard * self.context * self.tensor

    @property
    def fsdp(self) -> int:
        """Ranks over which FSDP shards a dense weight."""
        return self.shard * self.context

    @property
    def expert_rank(self) -> int:
        """The part of the experts that this rank holds."""
        return self.rank // self.tensor % self.expert

    @property
    def data(self) -> TrainerLayout:
        """The data-parallel rank and size, which the loop deals microbatches to."""
        within = self.context * self.tensor
        return TrainerLayout(data_parallel_rank=self.rank // within, data_parallel_size=self.replicate * self.shard)

    @property
    def is_first_of_data_rank(self) -> bool:
        """Return whether this rank speaks for its data-parallel rank: losses and metrics of the others repeat it."""
        return self.rank % (self.context * self.tensor) == 0

    def meshes(self, device_type: str) -> "Meshes":
        """A collective: every rank makes its process groups."""
        from torch.distributed.device_mesh import init_device_mesh

        def mesh(**sizes: int) -> "DeviceMesh":
            return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

        experts = None
        if self.expert > 1:
            outer = self.fsdp // self.expert
            experts = mesh(replicate=self.replicate, fsdp=outer, expert=self.expert, tensor=self.tensor)
        return Meshes(
            layout=self,
            ranks=mesh(replicate=self.replicate, shard=self.shard, context=self.context, tensor=self.tensor),
            weights=mesh(replicate=self.replicate, fsdp=self.fsdp, tensor=self.tensor),
            experts=experts,
        )


@frozen(kw_only=True, eq=False)
class Meshes:
    """The device meshes of a layout. Each of the three numbers the same ranks in the same order."""

    layout: ParallelLayout
    ranks: Any = field(repr=False)
    """DeviceMesh "replicate", "shard", "context", "tensor"."""
    weights: Any = field(repr=False)
    """DeviceMesh "replicate", "fsdp", "tensor": the root of the meshes that dense weights are DTensors on."""
    experts: Any = field(repr=False)
    """DeviceMesh "replicate", "fsdp", "expert", "tensor" for the weights of experts, or None without expert parallelism; "fsdp"
    has shard · context / expert ranks here."""

    @property
    def fsdp(self) -> "DeviceMesh":
        """The mesh that `fully_shard` takes for dense weights: one dimension, or with replicas two."""
        return _fsdp(self.weights, self.layout.replicate)

    @property
    def expert_fsdp(self) -> "DeviceMesh":
        """The mesh that `fully_shard` takes for experts that are divided over `expert`."""
        return _fsdp(self.experts, self.layout.replicate)

    @property
    def tensor(self) -> "DeviceMesh":
        """The one dimension that tensor-parallel weights are DTensors on before FSDP shards them."""
        mesh: DeviceMesh = self.weights["tensor"]
        return mesh

    @property
    def expert(self) -> "DeviceMesh":
        """The dimension that experts are divided over before FSDP shards them, and where there is one that of tensor ranks."""
        mesh: DeviceMesh = self.experts["expert", "tensor"] if self.layout.tensor > 1 else self.experts["expert"]
        return mesh

    @property
    def context_group(self) -> "ProcessGroup":
        """The ranks that share this rank's tokens."""
        group: ProcessGroup = self.ranks.get_group("context")
        return group


def _fsdp(root: Any, replicate: int) -> "DeviceMesh":
    mesh: DeviceMesh = root["replicate", "fsdp"] if replicate > 1 else root["fsdp"]
    return mesh
