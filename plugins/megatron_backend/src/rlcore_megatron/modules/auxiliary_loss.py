"""The losses of routers that a recipe turns on, by Megatron's own names for them.

Megatron's code for them counts padding and microbatches that only fill up a pipeline, takes all ranks' tokens to be equally
many and packed sequences to be one, and reduces some of its figures over some of the ranks. So here is another.
Shapes: S tokens that a router sees, N sequences of the microbatch, E experts.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from rlcore_megatron.layouts.parallel import Groups
from rlcore_megatron.modules.packing import PackedBatch
from rlcore_torchkit.trainer.microbatch import Microbatch

BALANCING = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Kinds of `moe_router_load_balancing_type` that have a loss, and the metric of each."""
Z_LOSS = "z_loss"


def coefficients(config: TransformerConfig) -> dict[str, float]:
    """The coefficients of the losses that are on, by their metrics."""
    if config.num_moe_experts is None:
        return {}
    kinds, weights = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    pairs = zip(_listed(kinds), _listed(weights), strict=True)
    found = {BALANCING[kind]: float(weight) for kind, weight in pairs if weight and kind in BALANCING}
    return found | ({Z_LOSS: float(config.moe_z_loss_coeff)} if config.moe_z_loss_coeff else {})


class PolicyRouter(TopKRouter):  # type: ignore[misc]
    """Megatron's router with these losses in the place of its own.

    For a token t with probabilities p(t), the softmax of its logits, they are E Σ_e f_e p_e(t) and logsumexp(logits)²
    (arXiv:2101.03961, equation 4; arXiv:2202.08906, equation 5). f_e is expert e's share of what the router chooses by itself,
    whatever it is told to: in the token's microbatch; for "seq_aux_loss" in its sequence; for "global_aux_loss"
    (arXiv:2501.11873) in the microbatches of all data-parallel ranks in this step so far. A step's loss is the mean over all
    tokens of all ranks, times the coefficient, added up over layers.
    """

    def __init__(self, config: TransformerConfig, pg_collection: Any = None, **options: Any) -> None:
        super().__init__(config=config, pg_collection=pg_collection, **options)
        self.coefficients = coefficients(config)
        self.routing_type = "none"  # turns Megatron's own off
        self.sequences: Tensor | None = None
        """int64 [S]: which of the microbatch's sequences each of the tokens belongs to; -1 for tokens that are none of its."""
        self.num_sequences = 0
        self._share: Tensor | None = None
        self._chosen: Tensor | None = None
        self._sums: dict[str, Tensor] = {}

    def begin(self, share: Tensor) -> None:
        """Begin a step; `share`, a float64 scalar, is 1 / the number of its tokens over all ranks."""
        self._share, self._sums = share, {}
        self._chosen = share.new_zeros(self.num_experts)

    def sums(self) -> Mapping[str, Tensor]:
        """float64 scalars: what this rank's tokens have added to each mean since `begin`, without the coefficient."""
        return self._sums

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:  # noqa: ARG002 - Megatron's
        """`logits` [S, E], with the gradients of all losses attached: Megatron calls this wherever it has new ones."""
        if not (self.coefficients and self.training and torch.is_grad_enabled()):
            return logits
        assert self._share is not None
        losses = self._losses(logits)
        for name, loss in losses.items():
            added = loss.detach().double() * self._share
            self._sums[name] = self._sums[name] + added if name in self._sums else added
        weighed = torch.stack([self.coefficients[name] * loss for name, loss in losses.items()]).sum()
        attached: Tensor = MoEAuxLossAutoScaler.apply(logits, weighed * self._share)
        return attached

    def _losses(self, logits: Tensor) -> dict[str, Tensor]:
        """Sums over this rank's tokens."""
        assert self.sequences is not None
        own = (self.sequences >= 0)[:, None]
        probabilities = logits.softmax(-1, dtype=torch.float32) * own
        with torch.no_grad():
            chosen = torch.zeros_like(probabilities, dtype=torch.float64)
            chosen = chosen.scatter_(1, logits.topk(self.topk, 1).indices, 1.0) * own
        losses = {}
        for name in self.coefficients:
            if name == Z_LOSS:
                losses[name] = (logits.logsumexp(-1).square() * own[:, 0]).sum()
            else:
                losses[name] = self.num_experts * (self._frequencies(name, chosen) * probabilities).sum()
        return losses

    @torch.no_grad()
    def _frequencies(self, name: str, chosen: Tensor) -> Tensor:
        """float32 [1, E] or [S, E], of each token, from `chosen` float64 [S, E], which is 1.0 at the experts of a token."""
        if name == BALANCING["seq_aux_loss"]:
            places = self.sequences + 1
            counts = chosen.new_zeros(self.num_sequences + 1, chosen.shape[1]).index_add_(0, places, chosen)
            return _shares(_added_up(counts, self.tp_cp_group))[places]
        counts = chosen.sum(0, keepdim=True)
        if name == BALANCING["global_aux_loss"]:
            self._chosen = self._chosen + _added_up(counts, self.tp_dp_cp_group)
            return _shares(self._chosen)
        return _shares(_added_up(counts, self.tp_cp_group))


@frozen(kw_only=True, eq=False)
class AuxiliaryLosses:
    """The losses of all of a model's routers on this rank."""

    config: TransformerConfig
    groups: Groups
    routers: Sequence[PolicyRouter]

    @classmethod
    def of(cls, model_chunks: Sequence[Any], groups: Groups) -> "AuxiliaryLosses":
        """The losses of the model with these model chunks, on a rank of these groups."""
        routers = [
            module for model_chunk in model_chunks for module in model_chunk.modules() if isinstance(module, PolicyRouter)
        ]
        return cls(config=model_chunks[0].config, groups=groups, routers=routers)

    def begin(self, microbatches: Sequence[Microbatch]) -> None:
        """Begin a step of these microbatches; called on every rank."""
        if not coefficients(self.config):
            return
        num_tokens = float(sum(batch.packed.num_tokens for batch in microbatches))
        tokens = torch.tensor(num_tokens, dtype=torch.float64, device=torch.cuda.current_device())
        _added_up(tokens, self.groups.data)
        for router in self.routers:
            router.begin(tokens.reciprocal())

    def metrics(self) -> dict[str, float]:
        """The step's means over all tokens and all layers with experts, without the coefficients, on every rank. A balancing
        loss is 1.0 where tokens are spread evenly."""
        names = list(coefficients(self.config))
        if not names:
            return {}
        sums = torch.zeros(len(names), dtype=torch.float64, device=torch.cuda.current_device())
        for router in self.routers:
            found = router.sums()
            if found:
                sums += torch.stack([found[name] for name in names])
        if dist.get_world_size() > 1:
            dist.all_reduce(sums)  # each token is one rank's alone, in each layer
        return dict(zip(names, (sums / self._num_layers).tolist(), strict=True))

    @property
    def _num_layers(self) -> int:
        layers = self.config.moe_layer_freq  # 1, or which of the layers have experts
        return sum(layers) if isinstance(layers, list) else int(self.config.num_layers)


def watch(model_chunks: Sequence[Any]) -> None:
    """Let routers know the sequences of the microbatches that a model's chunks are called with."""
    for model_chunk in model_chunks:
        for layer in model_chunk.decoder.layers:
            router = getattr(layer.mlp, "router", None)
            if router is not None and router.coefficients:
                layer.register_forward_pre_hook(_setter(router), with_kwargs=True)


def _setter(router: PolicyRouter) -> Callable[[Any, Any, dict[str, Any]], None]:
    def set_sequences(layer: Any, _: Any, options: dict[str, Any]) -> None:
        batch = options["packed_seq_params"]
        assert isinstance(batch, PackedBatch)
        assert batch.part is not None
        sequences = batch.sequences
        if layer.config.sequence_parallel:
            group = layer.pg_collection.tp
            sequences = sequences.chunk(group.size())[group.rank()]
        router.sequences, router.num_sequences = sequences, batch.part.packed.num_sequences

    return set_sequences


def _added_up(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Add a tensor up over the group's ranks, in place."""
    if group.size() > 1:
        dist.all_reduce(values, group=group)
    return values


def _shares(counts: Tensor) -> Tensor:
    """float32, of counts [..., E] in all of their row."""
    return (counts / counts.sum(-1, keepdim=True).clamp(min=1.0)).float()


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


class BiasCorrectedRouter(PolicyRouter):
    """A router whose bias for choosing experts, float32 [experts], is a parameter that no step moves. Megatron's own is a
    buffer that it moves in every step, which would make answers depend on past batches."""

    def __init__(self, config: TransformerConfig, pg_collection: Any = None, **options: Any) -> None:
        super().__init__(config, pg_collection, **options)
        zeros = torch.zeros(self.num_experts, dtype=torch.float32, device=self.weight.device)
        self.expert_bias = nn.Parameter(zeros, requires_grad=False)
