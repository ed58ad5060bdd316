"""Experts that are given take the place of those that routers choose: what trainers share of it.

Shapes: S tokens that a router sees, K experts of each.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from rlcore.spi.batch import ROUTED_EXPERTS, TokenBatch
from rlcore.spi.errors import ContractError
from rlcore_torchkit.architectures.dims import ModelDims


class ReplayedChoice:
    """The choice that a router's own is held against."""

    def __init__(self) -> None:
        self.targets: Tensor | None = None
        """int64 [S, K]: where the router's present tokens go; a row with a -1 is left to it. None leaves all of them to it."""
        self.alike: Tensor | None = None
        """float64 [2]: of the experts in all targets since `RoutingReplay.begin`, how many the router would have chosen too,
        and all. None where there were no targets."""

    def choose(self, own: Tensor) -> Tensor:
        """int64 [S, K]: where tokens go, given the router's own choice int64 [S, K]."""
        if self.targets is None:
            return own
        known = (self.targets >= 0).all(1, keepdim=True)
        found = (own[:, :, None] == self.targets[:, None]).any(-1) & known
        counts = torch.stack([found.sum(), known.sum() * own.shape[1]]).double()
        self.alike = counts if self.alike is None else self.alike + counts
        return torch.where(known, self.targets, own)


@frozen(eq=False)
class RoutingReplay:
    """The choices of all routers of a model on this rank."""

    choices: Sequence[ReplayedChoice]

    def begin(self) -> None:
        """Forget the counts of the step before; called before each step."""
        for choice in self.choices:
            choice.alike = None

    def metrics(self, microbatches: Sequence[TokenBatch], device: torch.device, world_size: int) -> dict[str, float]:
        """The metric `routing_agreement`: the share of the replayed experts that the trainer's routers would have chosen too.

        Called on every rank after a step; empty where its microbatches carry no routing.
        """
        if not any(ROUTED_EXPERTS in batch.token_columns for batch in microbatches):
            return {}
        seen = [choice.alike for choice in self.choices if choice.alike is not None]
        alike = torch.stack(seen).sum(0) if seen else torch.zeros(2, dtype=torch.float64, device=device)
        if world_size > 1:
            dist.all_reduce(alike)
        found, total = alike.tolist()
        return {"routing_agreement": found / total} if total else {}


def check_routing(microbatches: Sequence[TokenBatch], dims: ModelDims | None) -> None:
    """ContractError where microbatches carry a routing that is not that of a model with these sizes; None where they are not
    known, and no routing is replayed."""
    found = [batch.token_columns[ROUTED_EXPERTS] for batch in microbatches if ROUTED_EXPERTS in batch.token_columns]
    if found and len(found) < len(microbatches):
        where = f"{len(found)} of {len(microbatches)} microbatches"
        raise ContractError(f"{ROUTED_EXPERTS}: found in {where}; expected in all or in none")
    if found and dims is None:
        raise ContractError(f"{ROUTED_EXPERTS}: found in microbatches; expected none for a model that no family describes")
    for column in found:
        assert dims is not None
        if column.shape[1:] != (dims.num_layers, dims.num_experts_per_token) or column.max(initial=-1) >= dims.num_experts:
            given = f"{list(column.shape)} with experts up to {column.max(initial=-1)}"
            expected = f"[T, {dims.num_layers}, {dims.num_experts_per_token}] of the model's {dims.num_experts} experts"
            raise ContractError(f"{ROUTED_EXPERTS}: found {given}; expected {expected}")
