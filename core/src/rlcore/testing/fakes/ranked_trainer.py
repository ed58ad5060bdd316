"""The fake trainer on several ranks: each computes from its part of the data, and gloo adds up what they found."""

import numpy as np
import torch
import torch.distributed as dist

from rlcore.spi import (
    CloseRequest,
    SaveStateRequest,
    SaveStateResult,
    TrainerContext,
    TrainerLayout,
    hookimpl,
)
from rlcore.testing.fakes.policy import Float64Array
from rlcore.testing.fakes.trainer import FakeTrainer, FakeTrainerConfig


class RankedFakeTrainer(FakeTrainer):
    """The trainer backend `fake` with the capability `multi_rank`: data-parallel alone, every rank holds everything."""

    def __init__(self, context: TrainerContext, config: FakeTrainerConfig) -> None:
        super().__init__(context, config)
        place = context.rank_info
        self.layout = TrainerLayout(data_parallel_rank=place.rank, data_parallel_size=place.world_size)
        if place.world_size > 1:
            dist.init_process_group("gloo", init_method=place.rendezvous, rank=place.rank, world_size=place.world_size)

    @hookimpl
    def save_state(self, request: SaveStateRequest) -> SaveStateResult:
        """Rank 0 writes; every rank holds the same."""
        return super().save_state(request) if self.place.rank == 0 else SaveStateResult(files=())

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

    def over_ranks(self, figures: dict[str, float], how: str) -> dict[str, float]:
        """Each figure of the ranks together, by its "sum" or "max"; all ranks have figures of the same names."""
        values = torch.tensor([figures[name] for name in sorted(figures)], dtype=torch.float64)
        if self.place.world_size > 1:
            dist.all_reduce(values, dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX)
        return dict(zip(sorted(figures), values.tolist(), strict=True))

    def added(self, array: Float64Array) -> Float64Array:
        """Return the sum of an array over all ranks."""
        values = torch.from_numpy(array.copy())
        if self.place.world_size > 1:
            dist.all_reduce(values)
        return np.asarray(values.numpy())
