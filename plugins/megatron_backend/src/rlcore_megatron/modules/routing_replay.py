"""Routers that send tokens to the experts that the generator sent them to.

Megatron's own replay keeps one queue of choices for the whole process, in the order that layers are expected to run in. Here
each layer takes its choices from the microbatch it is called with, whatever comes before it: under pipelines and recomputation.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from rlcore_megatron.modules.packing import PackedBatch
from rlcore_torchkit.layers.routing_replay import ReplayedChoice, RoutingReplay

ComputeTopK = Callable[..., tuple[Tensor, Tensor]]


class RouterReplay(ReplayedChoice):
    """Takes the place of Megatron's own replay in a router. S tokens of this rank, E experts, K of them chosen."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, compute: ComputeTopK
    ) -> tuple[Tensor, Tensor]:
        """The scores [S, K] of the experts int64 [S, K] that tokens go to, from all experts' scores [S, E]."""
        values, own = compute(scores, topk, num_groups, group_topk)
        if self.targets is None:
            return values, own
        chosen = self.choose(own)
        return scores.gather(1, chosen), chosen


def attach(model_chunks: Sequence[Any]) -> None:
    """Let the microbatches that a model's chunks are called with decide on the routing, where they carry one."""
    for model_chunk in model_chunks:
        for layer in _expert_layers(model_chunk):
            choice = layer.mlp.router.router_replay = RouterReplay()
            layer.register_forward_pre_hook(_setter(choice), with_kwargs=True)


def replay_of(model_chunks: Sequence[Any]) -> RoutingReplay:
    """Return the replay of the attached routers; it is empty if none is attached."""
    found = [layer.mlp.router.router_replay for model_chunk in model_chunks for layer in _expert_layers(model_chunk)]
    return RoutingReplay([choice for choice in found if choice is not None])


def _expert_layers(model_chunk: Any) -> Iterator[Any]:
    return (layer for layer in model_chunk.decoder.layers if hasattr(layer.mlp, "router"))


def _setter(choice: ReplayedChoice) -> Callable[[Any, Any, dict[str, Any]], None]:
    def set_targets(layer: Any, _: Any, options: dict[str, Any]) -> None:
        batch = options["packed_seq_params"]
        assert isinstance(batch, PackedBatch)
        choice.targets = None if batch.routed is None else _targets(batch.routed[layer.layer_number - 1], layer)

    return set_targets


def _targets(routed: Tensor, layer: Any) -> Tensor:
    """int64 [S, K] of this tensor rank's share of the tokens, from int16 [K, S of this context rank]."""
    rows = routed.t()
    if layer.config.sequence_parallel:
        group = layer.pg_collection.tp
        rows = rows.chunk(group.size())[group.rank()]
    return rows.long()
