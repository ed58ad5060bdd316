"""The sources of all parameters of a model, by its family and sizes; imports no torch."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from attrs import evolve, frozen

from rlcore.spi import Head
from rlcore.spi.weights import VALUE_HEAD_WEIGHT
from rlcore_megatron.families.weight_source import EMBEDDING, MULTI_TOKEN_HEAD, OUTPUT, HfTensor, Source
from rlcore_torchkit.architectures.architecture import Architecture
from rlcore_torchkit.architectures.dims import ModelDims


@frozen
class WeightTable:
    """Makes the sources of all parameters of a model, in the order of its layers. Families with other layers override parts."""

    family: Architecture
    dims: ModelDims
    in_order: ClassVar[tuple[str, ...]] = ()
    """Names of modules in a layer whose tensors `attention` yields in the order of transformers' module."""

    def sources(self, head: Head) -> Iterator[Source]:
        """The embedding's, each layer's, the last norm's, and the head's where it has a weight of its own."""
        dims, modules = self.dims, self.family.modules
        table = (dims.vocab_size, dims.hidden_size)
        yield _source(EMBEDDING, HfTensor(name=f"{modules.embedding}.weight", shape=table, tp_dim=0))
        for layer, has_experts in enumerate(dims.has_experts):
            yield from self.attention(layer)
            yield from self.experts(layer) if has_experts else self.mlp(layer)
            yield from self.norms(layer)
        yield _source("decoder.final_layernorm.weight", HfTensor(name=f"{modules.norm}.weight", shape=(dims.hidden_size,)))
        if head == "value":
            yield _source(OUTPUT, HfTensor(name=VALUE_HEAD_WEIGHT, shape=(1, dims.hidden_size)))
        elif not dims.tied:
            yield _source(OUTPUT, HfTensor(name=f"{modules.head}.weight", shape=table, tp_dim=0))

    def multi_token_head(self) -> Iterator[Source]:
        """Yield the sources of the multi-token head: in the files it is one layer more, with copies of embedding and output
        layer."""
        dims, modules, layer = self.dims, self.family.modules, self.dims.num_layers
        for source in (*self.attention(layer), *self.experts(layer), *self.norms(layer)):
            within = source.parameter.removeprefix(f"decoder.layers.{layer}.")
            yield evolve(source, parameter=f"{MULTI_TOKEN_HEAD}transformer_layer.{within}")
        size = dims.hidden_size
        for ours, theirs, shape in (
            ("enorm", "enorm", (size,)),
            ("hnorm", "hnorm", (size,)),
            ("eh_proj", "eh_proj", (size, 2 * size)),
            ("final_layernorm", "shared_head.norm", (size,)),
        ):
            tensor = HfTensor(name=f"{modules.layers}.{layer}.{theirs}.weight", shape=shape)
            yield Source(parameter=f"{MULTI_TOKEN_HEAD}{ours}.weight", tensors=(tensor,), layer=layer)
        for shared, copy in ((EMBEDDING, "embed_tokens"), (OUTPUT, "shared_head.head")):
            name = f"{modules.layers}.{layer}.{copy}.weight"
            yield _source(shared, HfTensor(name=name, shape=(dims.vocab_size, size), tp_dim=0))

    def norms(self, layer: int) -> Iterator[Source]:
        """Yield the norms before attention and before the MLP or the experts."""
        modules = self.family.modules
        for ours, theirs in (("input", modules.input_norm), ("pre_mlp", modules.mlp_norm)):
            yield self.in_layer(layer, f"{ours}_layernorm.weight", theirs, (self.dims.hidden_size,))

    def attention(self, layer: int) -> Iterator[Source]:
        """Queries, keys and values, the output, and norms of heads."""
        dims, modules = self.dims, self.family.modules
        num_rows, num_kv_rows = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
        rows = {modules.query: num_rows, modules.key: num_kv_rows, modules.value: num_kv_rows}
        columns = {"weight": (dims.hidden_size,)} | ({"bias": ()} if self.family.has_qkv_biases else {})
        for kind, width in columns.items():
            yield Source(
                parameter=f"decoder.layers.{layer}.self_attention.linear_qkv.{kind}",
                tensors=tuple(
                    HfTensor(name=f"{modules.layers}.{layer}.{name}.{kind}", shape=(num, *width), tp_dim=0)
                    for name, num in rows.items()
                ),
                groups=dims.num_kv_heads,
                layer=layer,
            )
        shape = (dims.hidden_size, num_rows)
        yield self.in_layer(layer, "self_attention.linear_proj.weight", modules.output, shape, tp_dim=1)
        if self.family.has_qk_norms:
            for ours, theirs in (("q", modules.query_norm), ("k", modules.key_norm)):
                yield self.in_layer(layer, f"self_attention.{ours}_layernorm.weight", theirs, (dims.head_dim,))

    def mlp(self, layer: int) -> Iterator[Source]:
        """The MLP of a layer without experts."""
        yield from self._gated(layer, "mlp", self.family.modules.mlp, self.dims.intermediate_size)

    def _gated(self, layer: int, ours: str, name: str, width: int) -> Iterator[Source]:
        """An MLP of all tokens."""
        yield self._gate_and_up(layer, f"{ours}.linear_fc1.weight", name, width)
        down, shape = f"{name}.{self.family.modules.down}", (self.dims.hidden_size, width)
        yield self.in_layer(layer, f"{ours}.linear_fc2.weight", down, shape, tp_dim=1)

    def experts(self, layer: int) -> Iterator[Source]:
        """The experts, the router, and the expert of all tokens where there is one."""
        dims, modules = self.dims, self.family.modules
        for expert in range(dims.num_experts):
            name, width = f"{modules.experts}.{expert}", dims.moe_intermediate_size
            yield self._gate_and_up(layer, expert_name(expert, "linear_fc1"), name, width, expert)
            down = HfTensor(
                name=f"{modules.layers}.{layer}.{name}.{modules.down}.weight",
                shape=(dims.hidden_size, width),
                tp_dim=1,
                fused=(f"{modules.layers}.{layer}.{modules.experts}.down_proj", expert, 0),
            )
            parameter = f"decoder.layers.{layer}.{expert_name(expert, 'linear_fc2')}"
            yield Source(parameter=parameter, tensors=(down,), layer=layer, expert=expert)
        yield self.in_layer(layer, "mlp.router.weight", modules.router, (dims.num_experts, dims.hidden_size))
        if self.family.has_correction_bias:
            bias = HfTensor(
                name=f"{modules.layers}.{layer}.{modules.correction_bias}", shape=(dims.num_experts,), dtype="float32"
            )
            yield Source(parameter=f"decoder.layers.{layer}.mlp.router.expert_bias", tensors=(bias,), layer=layer)
        if dims.shared_intermediate_size:
            yield from self._gated(layer, "mlp.shared_experts", modules.shared_expert, dims.shared_intermediate_size)
        if dims.has_shared_gate:
            yield self.in_layer(layer, "mlp.shared_experts.gate_weight", modules.shared_gate, (1, dims.hidden_size))

    def _gate_and_up(self, layer: int, parameter: str, name: str, width: int, expert: int | None = None) -> Source:
        modules = self.family.modules
        fused = f"{modules.layers}.{layer}.{modules.experts}.gate_up_proj"
        return Source(
            parameter=f"decoder.layers.{layer}.{parameter}",
            tensors=tuple(
                HfTensor(
                    name=f"{modules.layers}.{layer}.{name}.{part}.weight",
                    shape=(width, self.dims.hidden_size),
                    tp_dim=0,
                    fused=None if expert is None else (fused, expert, index * width),
                )
                for index, part in enumerate((modules.gate, modules.up))
            ),
            layer=layer,
            expert=expert,
        )

    def in_layer(
        self,
        layer: int,
        parameter: str,
        name: str,
        shape: tuple[int, ...],
        tp_dim: Literal[0, 1] | None = None,
        suffix: str = ".weight",
    ) -> Source:
        """A tensor of a module `name` of the layer alone."""
        tensor = HfTensor(name=f"{self.family.modules.layers}.{layer}.{name}{suffix}", shape=shape, tp_dim=tp_dim)
        return Source(parameter=f"decoder.layers.{layer}.{parameter}", tensors=(tensor,), layer=layer)


def _source(parameter: str, tensor: HfTensor) -> Source:
    return Source(parameter=parameter, tensors=(tensor,))


def expert_name(expert: int, linear: str, kind: str = "weight") -> str:
    """Megatron's name of an expert's parameter, in a layer."""
    return f"mlp.experts.local_experts.{expert}.{linear}.{kind}"


@frozen
class LatentWeightTable(WeightTable):
    """Narrow projections, which each tensor rank has whole, norms behind them, and wide ones, of which it has its heads'."""

    in_order: ClassVar[tuple[str, ...]] = ("self_attn",)

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
