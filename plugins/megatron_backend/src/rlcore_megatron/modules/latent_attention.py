"""Multi-latent attention (arXiv:2405.04434, section 2.1) in Megatron's layers: queries, keys and values come from two narrow
projections, and only a part of each head is rotated.

Without TransformerEngine Megatron divides the narrow projections' rows by tensor ranks, and loses what other ranks' heads add
to the gradient of the rotated keys. Here each rank holds them whole for its part of the tokens, as with TransformerEngine.
"""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
    MultiLatentAttention,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from rlcore_megatron.modules.attention import PackedRotary
from rlcore_megatron.modules.packing import PackedBatch
from rlcore_megatron.modules.rms_norm import PlainRMSNorm

NORM_EPSILON = 1e-6
"""The ε of the narrow projections' norms: transformers takes it whatever config.json says of the other norms."""


class WholeLinear(nn.Module):
    """x · Wᵀ with a weight that every tensor rank holds whole and computes with for its own tokens.

    `sequence_parallel` on the weight has Megatron add the ranks' gradients up.
    """

    def __init__(self, config: TransformerConfig, input_size: int, output_size: int) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, states: Tensor) -> tuple[Tensor, None]:
        """The product, and no bias, as Megatron's linear layers return them."""
        return F.linear(states, self.weight), None


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Megatron's, for layers without TransformerEngine."""

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **options: Any,
    ) -> None:
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        place = {"cp_comm_type": cp_comm_type, "pg_collection": groups, **options}
        # Megatron takes TransformerEngine to be there where its own module for it can be imported, and then fails.
        with mock.patch.object(multi_latent_attention, "HAVE_TE", False):
            MultiLatentAttention.__init__(self, config, submodules, layer_number, attn_mask_type, "self", **place)
        heads, hidden = config.num_attention_heads, config.hidden_size
        if config.q_lora_rank is None:
            self.linear_q_proj = self._divided(hidden, heads * self.q_head_dim)
        else:
            self.linear_q_down_proj = WholeLinear(config, hidden, config.q_lora_rank)
            self.q_layernorm = PlainRMSNorm(config, config.q_lora_rank, NORM_EPSILON)
            self.linear_q_up_proj = self._divided(config.q_lora_rank, heads * self.q_head_dim)
        self.linear_kv_down_proj = WholeLinear(config, hidden, config.kv_lora_rank + config.qk_pos_emb_head_dim)
        self.kv_layernorm = PlainRMSNorm(config, config.kv_lora_rank, NORM_EPSILON)
        self.linear_kv_up_proj = self._divided(config.kv_lora_rank, heads * (config.qk_head_dim + config.v_head_dim))

    def _divided(self, input_size: int, output_size: int) -> ColumnParallelLinear:
        """A linear layer whose outputs, heads, tensor ranks divide."""
        return ColumnParallelLinear(
            input_size,
            output_size,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            gather_output=False,
            tp_group=self.pg_collection.tp,
        )


class LatentRotary(PackedRotary):
    """Angles for the rotated part of each head, and what their cosines and sines are multiplied by."""

    def __init__(self, inv_freq: Tensor, scale: float) -> None:
        super().__init__(inv_freq)
        self.scale = scale

    def forward(self, batch: PackedBatch, **_: Any) -> tuple[Tensor, float]:  # type: ignore[override]
        """float32 [S, 1, D] and the factor, as Megatron's yarn returns them."""
        return super().forward(batch).squeeze(1), self.scale


def finish(layers: Sequence[Any], rotary: LatentRotary) -> None:
    """Have a model chunk's layers rotate by these angles, and norm narrow projections as transformers does."""
    for layer in layers:
        attention = layer.self_attention
        attention.rotary_pos_emb = rotary
        for name in ("linear_q_up_proj", "linear_kv_up_proj"):  # with TransformerEngine they have the norm before them
            if hasattr(getattr(attention, name, None), "eps"):
                getattr(attention, name).eps = NORM_EPSILON
