"""Expert parallelism: the ranks of a group hold different experts of each layer and send tokens to one another.

Shapes: n tokens, K experts of each, E experts in all, P ranks, L = E / P experts of this rank, R rows received.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F

from rlcore.spi import ContractError

EXPERT_PARALLEL = "rlcore_expert_parallel"
"""The name under which transformers knows it."""


def expert_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules that hold a layer's experts as parameters with a leading dimension E, by name; none in a dense model."""
    for name, module in model.named_modules():
        if hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, nn.Parameter):
            yield name, module


def divide_experts(model: Any, mesh: DeviceMesh) -> None:
    """Keep, in place, this rank's share of every layer's experts, and let each token travel to the ranks of its experts.

    The first dimension of `mesh` is the expert group. Ranks along a second one, of tensor parallelism, see the same tokens:
    each sends some of them, holds the same experts as the others, and returns a summand of the whole output. The parameters
    become DTensors that keep their global shapes and names; their gradients are sums over the tokens of all these ranks.
    Raises ContractError where the ranks cannot share the experts equally.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERT_PARALLEL, expert_parallel_forward)
    model.set_experts_implementation(EXPERT_PARALLEL)
    num_ranks, rank = mesh.size(0), mesh.get_local_rank(0)
    placements = [Shard(0), *[Replicate()] * (mesh.ndim - 1)]
    for name, experts in expert_modules(model):
        if experts.num_experts % num_ranks:
            raise ContractError(f"{name}: found {experts.num_experts} experts; expected a multiple of {num_ranks} ranks")
        experts.expert_mesh = mesh
        for key, parameter in list(experts.named_parameters(recurse=False)):
            own = parameter.detach().chunk(num_ranks)[rank]
            if not own.is_meta:
                own = own.to(mesh.device_type, copy=True)  # the others' are freed
            divided = DTensor.from_local(own, mesh, placements, run_check=False)
            setattr(experts, key, nn.Parameter(divided, requires_grad=parameter.requires_grad))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # its shapes depend on the data
def expert_parallel_forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Σ over a token's experts of weight · expert(token): [n, H] of hidden states [n, H], in the form that transformers calls.

    `top_k_index`, int64 [n, K], names the experts and `top_k_weights` [n, K] weighs them. A collective over the expert group.
    """
    mesh = experts.expert_mesh
    if mesh.ndim == 1:
        return _routed(experts, hidden_states, top_k_index, top_k_weights)
    own = slice(mesh.get_local_rank(1), None, mesh.size(1))
    summand = torch.zeros_like(hidden_states)
    summand[own] = _routed(experts, hidden_states[own], top_k_index[own], top_k_weights[own])
    return summand


def _routed(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    routing = Routing.of(top_k_index, experts.num_experts, experts.expert_mesh.get_group(0))
    sent = hidden_states[routing.order // top_k_index.shape[1]]
    computed = _compute(experts, routing, routing.dispatch(sent))
    returned = routing.combine(computed).view(*top_k_index.shape, hidden_states.shape[1])
    return (returned * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)


@frozen(kw_only=True, eq=False)
class Routing:
    """The rows that go between the ranks of an expert group."""

    group: dist.ProcessGroup
    order: Tensor
    """int64 [n·K]: the token-expert pairs, numbered along K first, in the order of their experts, and so of their ranks."""
    sent: list[int]
    """[P] rows for each rank."""
    received: list[int]
    """[P] rows from each rank."""
    by_expert: Tensor
    """int64 [R]: the received rows, which come by rank and then by expert, in the order of their experts."""
    rows_per_expert: list[int]
    """[L] rows for each of this rank's experts, all together R."""
    ends: Tensor
    """int32 [L]: where each expert's rows end in that order, on the device."""

    @classmethod
    def of(cls, top_k_index: Tensor, num_experts: int, group: dist.ProcessGroup) -> "Routing":
        """A collective; reads the counts back from the device, once."""
        chosen, num_ranks = top_k_index.reshape(-1), group.size()
        counts = chosen.new_zeros(num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts, group=group)
        sent, received = torch.stack([counts, incoming]).view(2, num_ranks, -1).tolist()
        num_local = num_experts // num_ranks
        local = torch.arange(num_local, device=chosen.device).repeat(num_ranks)
        experts = local.repeat_interleave(incoming, output_size=sum(map(sum, received)))
        return cls(
            group=group,
            order=chosen.argsort(stable=True),
            sent=[sum(row) for row in sent],
            received=[sum(row) for row in received],
            by_expert=experts.argsort(stable=True),
            rows_per_expert=[sum(column) for column in zip(*received, strict=True)],
            ends=incoming.view(num_ranks, -1).sum(0).cumsum(0).int(),
        )

    def dispatch(self, rows: Tensor) -> Tensor:
        """[R, H], ordered by this rank's experts, from rows [n·K, H] in `order`."""
        received = all_to_all_single_autograd(rows, self.received, self.sent, self.group)
        return received[self.by_expert]

    def combine(self, rows: Tensor) -> Tensor:
        """[n·K, H] as the pairs are numbered, from what was computed of `dispatch`."""
        returned = all_to_all_single_autograd(rows[_inverse(self.by_expert)], self.sent, self.received, self.group)
        return returned[_inverse(self.order)]


def _inverse(permutation: Tensor) -> Tensor:
    places = torch.arange(len(permutation), device=permutation.device)
    return torch.empty_like(permutation).index_copy_(0, permutation, places)


def _compute(experts: Any, routing: Routing, rows: Tensor) -> Tensor:
    """[R, H]: each of this rank's experts on its rows of [R, H]."""
    gate_up, down = _local(experts.gate_up_proj), _local(experts.down_proj)
    gated = experts._apply_gate(_grouped_linear(rows.to(gate_up.dtype), gate_up, routing))
    return _grouped_linear(gated, down, routing)


def _grouped_linear(rows: Tensor, weights: Tensor, routing: Routing) -> Tensor:
    """[R, O] from rows [R, I] and weights [L, O, I]: in bfloat16 by one grouped product."""
    if rows.dtype == torch.bfloat16 and len(rows):
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=routing.ends)
    pairs = zip(torch.split(rows, routing.rows_per_expert), weights.unbind(), strict=True)
    return torch.cat([F.linear(part, weight) for part, weight in pairs])


def _local(parameter: DTensor) -> Tensor:
    """This rank's experts [L, ...], whose gradient is a summand along a mesh's second dimension."""
    return parameter.to_local(grad_placements=[Shard(0), *[Partial()] * (parameter.device_mesh.ndim - 1)])
