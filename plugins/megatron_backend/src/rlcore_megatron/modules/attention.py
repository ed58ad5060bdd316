"""Attention over packed sequences inside Megatron's layers, and the rotary embedding of their positions.

Megatron's own attention for torch knows neither packed sequences nor context parallelism.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from rlcore.spi import ContractError
from rlcore_megatron.families.family import MegatronFamily
from rlcore_megatron.modules.packing import PackedBatch
from rlcore_torchkit.forward.context_parallel import exchanged_attention
from rlcore_torchkit.layers.packed_attention import packed_attention


class CoreAttention(nn.Module, ABC):
    """The core attention of a layer: causal, of every sequence to itself, over tokens that context ranks may share."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        _check_kind(layer_number, attn_mask_type, attention_type, attention_dropout)
        self._config, self._layer_number, self._scale = config, layer_number, softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,  # noqa: ARG002 - the arguments are Megatron's, by these names
        attn_mask_type: AttnMaskType | None = None,  # noqa: ARG002
        attention_bias: Tensor | None = None,  # noqa: ARG002
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """[S, 1, H·V] from query [S, 1, H, D], key [S, 1, K, D] and value [S, 1, K, V] of this context rank's tokens;
        multi-latent attention gives them without the second dimension."""
        assert isinstance(packed_seq_params, PackedBatch)
        part = packed_seq_params.part
        assert part is not None
        attend = partial(self._attend, packed_seq_params)
        states = (heads.squeeze(1) if heads.ndim == 4 else heads for heads in (query, key, value))
        return exchanged_attention(*states, part, attend).flatten(1)[:, None]

    @abstractmethod
    def _attend(self, batch: PackedBatch, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[T, heads, V] from query and key [T, heads, D] and value [T, heads, V], of all tokens."""


class PackedAttention(CoreAttention):
    """Attention over packed sequences with torch's kernels, with the windows, sinks and soft caps that the family has. `scale`
    is that of scores, where it is another than Megatron gives."""

    def __init__(
        self,
        config: TransformerConfig,
        *arguments: Any,
        family: MegatronFamily,
        scale: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config, *arguments, **options)
        if scale is not None:
            self._scale = scale
        self._cap = family.score_cap
        self._window = family.windows[self._layer_number - 1] if family.windows else None
        self.softmax_offset: nn.Parameter | None = None
        if family.has_sinks:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            zeros = torch.zeros(heads, dtype=config.params_dtype, device=torch.cuda.current_device())
            self.softmax_offset = nn.Parameter(zeros)
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def _attend(self, batch: PackedBatch, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        part = batch.part
        assert part is not None
        heads = (states.transpose(0, 1)[None] for states in (query, key, value))
        sinks = None if self.softmax_offset is None else part.own_heads(self.softmax_offset)
        options: dict[str, Any] = {"scaling": self._scale, "softcap": self._cap}
        options |= {"sliding_window": self._window, "s_aux": sinks}
        output, _ = packed_attention(self, *heads, None, packed=part.packed, **options)
        return output[0]

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Any = (),
        metadata: Any = None,  # noqa: ARG002 - as Megatron calls it
    ) -> dict[str, Any]:
        """The sinks, which tensor ranks divide, as Megatron's distributed checkpoints have them."""
        state = self.state_dict(prefix="", keep_vars=True)
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets)
        return found


class FusedAttention(CoreAttention):
    """Attention with TransformerEngine's kernels: cuDNN's fused attention, or flash attention if it is installed."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._kernels: dict[tuple[int, ...], Any] = {}

    def _attend(self, batch: PackedBatch, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert batch.part is not None
        packed = batch.part.packed
        output: Tensor = self._kernel(*query.shape[1:], *value.shape[1:])(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            qkv_format="thd",
            attn_mask_type="padding_causal",
            cu_seqlens_q=packed.cu_seqlens,
            cu_seqlens_kv=packed.cu_seqlens,
            max_seqlen_q=packed.max_length,
            max_seqlen_kv=packed.max_length,
        )
        return output.view(*query.shape[:2], value.shape[2])

    def _kernel(self, num_heads: int, width: int, num_kv_heads: int, value_width: int) -> Any:
        """TransformerEngine's module for so many heads of such widths, which has no parameters."""
        place = num_heads, width, num_kv_heads, value_width
        if place not in self._kernels:
            from transformer_engine.pytorch import DotProductAttention

            self._kernels[place] = DotProductAttention(
                num_attention_heads=num_heads,
                kv_channels=width if width == value_width else (width, value_width),
                num_gqa_groups=num_kv_heads,
                attention_dropout=0.0,
                qkv_format="thd",
                attn_mask_type="padding_causal",
                softmax_scale=self._scale,
                layer_number=self._layer_number,
            )
        return self._kernels[place]


def _check_kind(layer_number: int, mask: AttnMaskType, kind: str, dropout: float | None) -> None:
    if mask is not AttnMaskType.causal or kind != "self" or dropout:
        found = f"{mask}, {kind} attention, dropout {dropout}"
        raise ContractError(f"layer {layer_number}: found {found}; expected causal self-attention without dropout")


class PackedRotary(nn.Module):
    """Rotary angles by each token's position in its own sequence; Megatron's own embedding knows one sequence only.

    `inv_freq` float32 [D/2], with whatever scaling the model has already in it.
    """

    def __init__(self, inv_freq: Tensor) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def get_rotary_seq_len(
        self,
        inference_context: Any,  # noqa: ARG002
        decoder: Any,  # noqa: ARG002
        decoder_input: Any,  # noqa: ARG002
        config: Any,  # noqa: ARG002
        packed_seq_params: PackedBatch,
    ) -> PackedBatch:
        """Return an argument of `forward`, which Megatron passes on unread."""
        return packed_seq_params

    def forward(self, batch: PackedBatch, **_: Any) -> Tensor:
        """float32 [S, 1, 1, D]: each frequency twice, as half-split rotation reads them."""
        assert batch.positions is not None
        angles = torch.outer(batch.positions.float(), self.inv_freq)
        return torch.cat((angles, angles), -1)[:, None, None]


class GridRotary(PackedRotary):
    """Rotary angles by time, height and width of each token (arXiv:2409.12191, section 2.1); for text all are its position.

    `sections` are the numbers of frequencies that turn by each axis: one axis after another, or `interleaved` in turns.
    """

    def __init__(self, inv_freq: Tensor, sections: Sequence[int], *, interleaved: bool) -> None:
        super().__init__(inv_freq)
        axes = torch.arange(len(sections)).repeat_interleave(torch.tensor(sections))
        if interleaved:
            axes = torch.zeros_like(axes)
            for axis in range(1, len(sections)):
                axes[axis : len(sections) * sections[axis] : len(sections)] = axis
        self.register_buffer("axes", axes.to(inv_freq.device), persistent=False)

    def forward(self, batch: PackedBatch, **options: Any) -> Tensor:
        """Return the angles of each token, by its position in time, height and width."""
        if batch.grid_positions is None:
            return super().forward(batch, **options)
        angles = batch.grid_positions[self.axes].T.float() * self.inv_freq
        return torch.cat((angles, angles), -1)[:, None, None]
