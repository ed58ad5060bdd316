"""Numbering and division of the trainer's ranks, in Megatron's order "tp-cp-ep-dp-pp"; imports no torch."""

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen

from rlcore.spi import TrainerLayout
from rlcore_megatron.layouts.auto_layout import choose
from rlcore_megatron.layouts.memory import Workload
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_torchkit.distributed.rank_grid import RankGrid


@frozen(kw_only=True)
class ParallelLayout(RankGrid):
    """The sizes of the dimensions, of which `tensor` varies fastest as ranks count up, then `context`, `data`, `pipeline`.

    The tensor · context · data ranks of a stage are numbered a second time for its experts: `expert_tensor` fastest, then
    `expert`, then the ranks that hold the same experts.
    """

    data: int = 1
    """Ranks that take microbatches of their own."""
    pipeline: int = 1
    """The number of pipeline stages."""
    virtual_pipeline: int = 1
    """Parts of the model on each stage."""
    expert: int = 1
    """Ranks of a stage that share its experts."""
    expert_tensor: int = 1
    """Ranks of a stage that share each expert's columns."""
    reason: str = field(default="", eq=False)
    """The reason for the sizes that "auto" chose; empty where the recipe named them all."""

    @classmethod
    def of(
        cls,
        config: MegatronConfig,
        rank: int,
        world_size: int,
        model: Mapping[str, Any],
        device: Literal["cpu", "cuda"],
        max_sequence_length: int,
        **workload: Any,
    ) -> "ParallelLayout":
        """The layout of a section that `check` found nothing wrong with, "auto" resolved; `data` is what the others leave.

        `model` is the content of config.json. `workload` are further fields of Workload: the memory of a device, say, which has
        to be the same number on every rank. ConfigError where no layout fits.
        """
        load = Workload(world_size=world_size, model=model, device=device, max_sequence_length=max_sequence_length, **workload)
        choice = choose(config, load)
        sizes = choice.config
        tensor, context, pipeline = map(int, (sizes.tensor_parallel, sizes.context_parallel, sizes.pipeline_parallel))
        return cls(
            rank=rank,
            tensor=tensor,
            context=context,
            data=world_size // (tensor * context * pipeline),
            pipeline=pipeline,
            virtual_pipeline=sizes.virtual_pipeline_parallel,
            expert=int(sizes.expert_parallel),
            expert_tensor=sizes.expert_tensor_parallel,
            sequence_parallel=sizes.sequence_parallel,
            reason=choice.reason,
        )

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tensor * self.context * self.data

    @property
    def world_size(self) -> int:
        return self.stage_size * self.pipeline

    @property
    def data_rank(self) -> int:
        return self.rank // (self.tensor * self.context) % self.data

    @property
    def pipeline_rank(self) -> int:
        return self.rank // self.stage_size

    @property
    def expert_tensor_rank(self) -> int:
        return self.rank % self.expert_tensor

    @property
    def expert_rank(self) -> int:
        """The part of the experts that this rank holds."""
        return self.rank // self.expert_tensor % self.expert

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline - 1

    @property
    def is_first_of_data_rank(self) -> bool:
        """True where this rank speaks for its data-parallel rank among those that hold the logits: tensor and context ranks
        repeat its losses and metrics, and stages before the last have none."""
        return self.is_last_stage and self.tensor_rank == 0 and self.context_rank == 0

    @property
    def data_layout(self) -> TrainerLayout:
        """The data-parallel rank and size, which the loop deals microbatches to."""
        return TrainerLayout(data_parallel_rank=self.data_rank, data_parallel_size=self.data)
