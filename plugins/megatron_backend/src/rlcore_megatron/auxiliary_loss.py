"""The router's auxiliary losses, which Megatron adds to the gradients behind the loss's back, where a recipe turns them on."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker, track_moe_metrics
from megatron.core.transformer.transformer_config import TransformerConfig

from rlcore.torchkit.microbatch import Microbatch
from rlcore_megatron.layout import ParallelLayout
from rlcore_megatron.parallel import Groups

BALANCING = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Kinds of `moe_router_load_balancing_type` that have a loss, and what Megatron calls it where it counts."""


@frozen(kw_only=True, eq=False)
class AuxiliaryLoss:
    """Weighs each microbatch's auxiliary loss by its tokens, so that their mean over the step is what the coefficient scales.

    Megatron multiplies it by the tokens of one rank, expecting all gradients to be divided by all tokens afterwards. Ours are
    not, so it is scaled down by itself: Megatron's scale is that of the loss too, which is then scaled up before.
    """

    config: TransformerConfig
    layout: ParallelLayout
    groups: Groups

    @property
    def names(self) -> list[str]:
        """Of the losses that are on, as Megatron counts them."""
        if self.config.num_moe_experts is None:
            return []
        kinds, coefficients = self.config.moe_router_load_balancing_type, self.config.moe_aux_loss_coeff
        pairs = zip(
            [kinds] if isinstance(kinds, str) else kinds,
            coefficients if isinstance(coefficients, Sequence) else [coefficients],
            strict=True,
        )
        balancing = [BALANCING[kind] for kind, coefficient in pairs if coefficient and kind in BALANCING]
        return [*balancing, *(["z_loss"] if self.config.moe_z_loss_coeff else [])]

    def begin(self, microbatches: Sequence[Microbatch]) -> float:
        """Set Megatron's scale for a step; returns what the loss has to be divided by before its backward pass."""
        if not self.names:
            return 1.0
        tokens = torch.tensor(float(sum(batch.packed.num_tokens for batch in microbatches)), device=torch.cuda.current_device())
        dist.all_reduce(tokens, group=self.groups.data)
        # Tensor and context ranks count a share of a microbatch's tokens each.
        scale = self.layout.tensor * self.layout.context / float(tokens)
        self.config.grad_scale_func = lambda loss: loss * scale
        return scale

    def metrics(self, num_microbatches: int) -> dict[str, float]:
        """Mean over microbatches, layers and data-parallel ranks, without the coefficient; `load_balancing_loss` is 1.0 where
        tokens are spread evenly."""
        if not self.names:
            return {}
        found: dict[str, Any] = {}
        tracker = get_moe_layer_wise_logging_tracker()
        track_moe_metrics(
            1.0 / num_microbatches,
            0,
            total_loss_dict=found,
            force_initialize=True,
            track_names=[name for name in self.names if name in tracker or self.layout.pipeline > 1],
            num_layers=self.config.num_layers,
            moe_layer_freq=self.config.moe_layer_freq,
        )
        return {name: float(value) for name, value in found.items()}
