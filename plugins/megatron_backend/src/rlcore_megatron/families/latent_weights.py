"""The parameters of layers with multi-latent attention; imports no torch."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from attrs import frozen

from rlcore_megatron.families.weight_source import Source
from rlcore_megatron.families.weight_table import WeightTable


@frozen
class LatentWeightTable(WeightTable):
    """Narrow projections, which each tensor rank has whole, norms behind them, and wide ones, of which it has its heads'."""

    lists_attention_in_order: ClassVar[bool] = True

    def attention(self, layer: int) -> Iterator[Source]:
        """In the order of transformers' module."""
        dims, modules, latent = self.dims, self.family.modules, self.dims.latent
        assert latent is not None
        hidden, heads = dims.hidden_size, dims.num_heads
        if latent.query_rank is None:
            yield self._projection(layer, "q_proj", modules.query, (heads * latent.key_width, hidden), 0)
        else:
            yield self._projection(layer, "q_down_proj", modules.query_down, (latent.query_rank, hidden))
            yield self._norm(layer, "q", latent.query_rank)
            yield self._projection(layer, "q_up_proj", modules.query_up, (heads * latent.key_width, latent.query_rank), 0)
        shape = (latent.key_rank + latent.rotary_width, hidden)
        yield self._projection(layer, "kv_down_proj", modules.key_value_down, shape)
        yield self._norm(layer, "kv", latent.key_rank)
        rows = heads * (latent.plain_width + latent.value_width)
        yield self._projection(layer, "kv_up_proj", modules.key_value_up, (rows, latent.key_rank), 0)
        yield self._projection(layer, "proj", modules.output, (hidden, heads * latent.value_width), 1)

    def _projection(
        self, layer: int, ours: str, theirs: str, shape: tuple[int, int], tp_dim: Literal[0, 1] | None = None
    ) -> Source:
        return self.in_layer(layer, f"self_attention.linear_{ours}.weight", theirs, shape, tp_dim)

    def _norm(self, layer: int, kind: str, width: int) -> Source:
        return self.in_layer(
            layer, f"self_attention.{kind}_layernorm.weight", f"{self.family.modules.attention}.{kind}_a_layernorm", (width,)
        )
