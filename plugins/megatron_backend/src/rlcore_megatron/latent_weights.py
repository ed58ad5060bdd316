"""The parameters of layers with multi-latent attention; imports no torch."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from attrs import frozen

from rlcore_megatron.weight_source import Source
from rlcore_megatron.weight_table import WeightTable


@frozen
class LatentWeightTable(WeightTable):
    """Narrow projections, which each tensor rank has whole, norms behind them, and wide ones, of which it has its heads'."""

    lists_attention_in_order: ClassVar[bool] = True

    def attention(self, layer: int) -> Iterator[Source]:
        """In the order of transformers' module."""
        dims, latent = self.dims, self.dims.latent
        assert latent is not None
        hidden, heads = dims.hidden_size, dims.num_heads
        if latent.query_rank is None:
            yield self._projection(layer, "q_proj", "q_proj", (heads * latent.key_width, hidden), 0)
        else:
            yield self._projection(layer, "q_down_proj", "q_a_proj", (latent.query_rank, hidden))
            yield self._norm(layer, "q", latent.query_rank)
            yield self._projection(layer, "q_up_proj", "q_b_proj", (heads * latent.key_width, latent.query_rank), 0)
        yield self._projection(layer, "kv_down_proj", "kv_a_proj_with_mqa", (latent.key_rank + latent.rotary_width, hidden))
        yield self._norm(layer, "kv", latent.key_rank)
        rows = heads * (latent.plain_width + latent.value_width)
        yield self._projection(layer, "kv_up_proj", "kv_b_proj", (rows, latent.key_rank), 0)
        yield self._projection(layer, "proj", "o_proj", (hidden, heads * latent.value_width), 1)

    def _projection(
        self, layer: int, ours: str, theirs: str, shape: tuple[int, int], tp_dim: Literal[0, 1] | None = None
    ) -> Source:
        return self.in_layer(layer, f"self_attention.linear_{ours}.weight", f"self_attn.{theirs}", shape, tp_dim)

    def _norm(self, layer: int, kind: str, width: int) -> Source:
        return self.in_layer(layer, f"self_attention.{kind}_layernorm.weight", f"self_attn.{kind}_a_layernorm", (width,))
