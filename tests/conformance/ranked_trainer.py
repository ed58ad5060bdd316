"""The fake trainer on several ranks: each computes from its part of the data, and gloo adds up what they found."""

import numpy as np
import torch
import torch.distributed as dist
from attrs import evolve

from rlcore.spi import (
    CloseRequest,
    SaveStateRequest,
    SaveStateResult,
    TrainerContext,
    TrainerLayout,
    capabilities,
    hookimpl,
)
from rlcore.testing.fakes.policy import Float64Array
from rlcore.testing.fakes.providers import FAKE_TRAINER
from rlcore.testing.fakes.trainer import FakeTrainer, FakeTrainerConfig


class RankedFakeTrainer(FakeTrainer):
    """The trainer backend `fake` with the capability `multi_rank`: data-parallel alone, every rank holds everything."""

    def __init__(self, context: TrainerContext, config: FakeTrainerConfig) -> None:
        super().__init__(context, config)
        info = context.rank_info
        self.layout = TrainerLayout(data_parallel_rank=info.rank, data_parallel_size=info.world_size)
        if info.world_size > 1 and not dist.is_initialized():  # by another trainer of this process, such as a policy's critic
            dist.init_process_group("gloo", init_method=info.rendezvous, rank=info.rank, world_size=info.world_size)

    @hookimpl
    def save_state(self, request: SaveStateRequest) -> SaveStateResult:
        """Rank 0 writes; every rank holds the same."""
        return super().save_state(request) if self.rank_info.rank == 0 else SaveStateResult(files=())

    @hookimpl
    def close(self, request: CloseRequest) -> None:
        """Free everything, and leave the other ranks."""
        if dist.is_initialized():
            dist.destroy_process_group()
        return super().close(request)

    def reduced(
        self, loss: float, sums: dict[str, float], maxima: dict[str, float], grads: dict[str, Float64Array]
    ) -> tuple[float, dict[str, float], dict[str, Float64Array]]:
        """Sums and gradients are added over the ranks; of maxima the greatest counts."""
        return (
            self.over_ranks({"": loss}, "sum")[""],
            self.over_ranks(sums, "sum") | self.over_ranks(maxima, "max"),
            {name: self.added(grad) for name, grad in grads.items()},
        )

    def over_ranks(self, metrics: dict[str, float], how: str) -> dict[str, float]:
        """Combine each metric over the ranks, by its "sum" or "max"; all ranks have metrics of the same names."""
        values = torch.tensor([metrics[name] for name in sorted(metrics)], dtype=torch.float64)
        if self.rank_info.world_size > 1:
            dist.all_reduce(values, dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX)
        return dict(zip(sorted(metrics), values.tolist(), strict=True))

    def added(self, array: Float64Array) -> Float64Array:
        """Return the sum of an array over all ranks."""
        values = torch.from_numpy(array.copy())
        if self.rank_info.world_size > 1:
            dist.all_reduce(values)
        return np.asarray(values.numpy())


FAKE_RANKED_TRAINER = evolve(
    FAKE_TRAINER, capabilities=FAKE_TRAINER.capabilities | {capabilities.MULTI_RANK}, backend="ranked_trainer:RankedFakeTrainer"
)
