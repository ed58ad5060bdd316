"""Qwen3-Next and the language models of Qwen3.5: gated delta nets (arXiv:2412.06464) in most layers, and attention whose output
has gates in the others."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from attrs import evolve, frozen

from rlcore.schema.constraints import Positive
from rlcore.spi import Problem
from rlcore_megatron.families.family import NO_BIASES, REMEDY, SILU, MegatronFamily, well_formed
from rlcore_megatron.families.weight_source import Blocks, HfTensor, Source
from rlcore_megatron.families.weight_table import WeightTable

DELTA: Mapping[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
TYPES: Mapping[str, Any] = {
    **dict.fromkeys((*DELTA, "num_hidden_layers", "full_attention_interval"), Positive),
    "layer_types": tuple[str, ...],
    "attention_bias": bool,
}
DEFAULTS: Mapping[str, Any] = {
    **DELTA,
    "num_hidden_layers": 32,
    "full_attention_interval": 4,
    "layer_types": None,
}
"""The defaults of transformers for keys that config.json lacks."""
SHARED_EXPERT = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}


class DeltaTable(WeightTable):
    """Gates come in the tensor of the queries, head by head; those of delta nets' heads likewise."""

    in_order: ClassVar[tuple[str, ...]] = ("self_attn", "linear_attn")

    def attention(self, layer: int) -> Iterator[Source]:
        """The layer's attention, or the gated delta net in its place."""
        if self.dims.has_delta[layer]:
            yield from self._delta_net(layer)
            return
        width = self.dims.head_dim
        for source in super().attention(layer):
            if source.groups is None:
                yield source
                continue
            queries, *others = source.tensors
            rows, *columns = queries.shape
            parts = _parts(queries.name, rows // width, {"query": width, "gate": width}, columns)
            yield evolve(source, tensors=(*parts, *others))

    def _delta_net(self, layer: int) -> Iterator[Source]:
        delta, hidden = self.dims.delta, self.dims.hidden_size
        assert delta is not None
        keys, values = delta.num_key_heads * delta.key_width, delta.num_value_heads * delta.value_width
        for name in ("dt_bias", "A_log"):
            yield self._of_net(layer, name, (delta.num_value_heads,), 0, suffix=f".{name}")
        convolution = _parts(self._name(layer, "conv1d"), 1, {"query": keys, "key": keys, "value": values}, (1, delta.kernel))
        yield Source(parameter=self._parameter(layer, "conv1d"), tensors=convolution, layer=layer)
        yield from self._projections(layer, hidden, values)

    def _projections(self, layer: int, hidden: int, values: int) -> Iterator[Source]:
        yield self._inputs(layer)
        yield from self._outputs(layer, hidden, values)

    def _outputs(self, layer: int, hidden: int, values: int) -> Iterator[Source]:
        delta = self.dims.delta
        assert delta is not None
        yield self._of_net(layer, "out_norm.weight", (delta.value_width,), name=".norm")
        yield self._of_net(layer, "out_proj.weight", (hidden, values), 1, name=".out_proj")

    def _inputs(self, layer: int) -> Source:
        """The rows of queries, keys, values and gates of each key head follow on each other, and those of both rates."""
        delta, columns = self.dims.delta, (self.dims.hidden_size,)
        assert delta is not None
        shared = delta.num_value_heads // delta.num_key_heads
        values = shared * delta.value_width
        sizes = {"query": delta.key_width, "key": delta.key_width, "value": values, "gate": values}
        rates = {"beta": shared, "alpha": shared}
        tensors = (
            *_parts(self._name(layer, "in_proj_qkvz"), delta.num_key_heads, sizes, columns),
            *_parts(self._name(layer, "in_proj_ba"), delta.num_key_heads, rates, columns),
        )
        return Source(parameter=self._parameter(layer, "in_proj"), tensors=tensors, layer=layer)

    def _of_net(
        self, layer: int, parameter: str, shape: tuple[int, ...], tp_dim: Any = None, name: str = "", suffix: str = ".weight"
    ) -> Source:
        whole = f"{self.family.modules.delta_net}{name}"
        return self.in_layer(layer, f"self_attention.{parameter}", whole, shape, tp_dim, suffix)

    def _name(self, layer: int, name: str) -> str:
        return f"{self.family.modules.layers}.{layer}.{self.family.modules.delta_net}.{name}.weight"

    def _parameter(self, layer: int, name: str) -> str:
        return f"decoder.layers.{layer}.self_attention.{name}.weight"


class Qwen35Table(DeltaTable):
    """Queries, keys and values of all heads follow on each other in one tensor, and gates and both rates have their own."""

    def _projections(self, layer: int, hidden: int, values: int) -> Iterator[Source]:
        yield from self._outputs(layer, hidden, values)
        yield self._inputs(layer)

    def _inputs(self, layer: int) -> Source:
        delta, hidden = self.dims.delta, self.dims.hidden_size
        assert delta is not None
        keys, values = delta.num_key_heads * delta.key_width, delta.num_value_heads * delta.value_width
        rows = {"in_proj_z": values, "in_proj_b": delta.num_value_heads, "in_proj_a": delta.num_value_heads}
        tensors = (
            *_parts(self._name(layer, "in_proj_qkv"), 1, {"query": keys, "key": keys, "value": values}, (hidden,)),
            *(HfTensor(name=self._name(layer, name), shape=(num, hidden), tp_dim=0) for name, num in rows.items()),
        )
        return Source(parameter=self._parameter(layer, "in_proj"), tensors=tensors, layer=layer)


def _parts(name: str, periods: int, sizes: Mapping[str, int], columns: Sequence[int]) -> tuple[HfTensor, ...]:
    """The tensors whose rows take turns in those of the file's tensor `name`, so many of each in each period."""
    period, first, found = sum(sizes.values()), 0, []
    for part, size in sizes.items():
        place = Blocks(name=name, shape=(periods * period, *columns), first=first, size=size, period=period)
        found.append(HfTensor(name=f"{name}.{part}", shape=(periods * size, *columns), tp_dim=0, place=place))
        first += size
    return tuple(found)


@frozen(kw_only=True)
class DeltaFamily(MegatronFamily):
    """A family with gated delta nets, as the model of one config.json has it."""

    def layer_problems(self, standard: Mapping[str, Any], path: str) -> Iterator[Problem]:
        """Yield what all families refuse, and heads of values that cannot share the heads of keys."""
        yield from super().layer_problems(standard, path)
        keys, values = standard["linear_num_key_heads"], standard["linear_num_value_heads"]
        if values % keys:
            expected = f"a multiple of linear_num_key_heads = {keys}"
            yield Problem(path=path, found=f"linear_num_value_heads = {values}", expected=expected, remedy=REMEDY)


def qwen3_next(config: Mapping[str, Any]) -> MegatronFamily:
    """Qwen3-Next."""
    sizes = {"num_hidden_layers": 48, "num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10}
    defaults = {**SHARED_EXPERT, **sizes, "norm_topk_prob": True}
    return DeltaFamily(**_shared("qwen3_next", "Qwen3NextForCausalLM", config, defaults), table=DeltaTable)


def qwen3_5_text(config: Mapping[str, Any]) -> MegatronFamily:
    """A language model of Qwen3.5 without experts."""
    defaults = {"num_key_value_heads": 4}
    return DeltaFamily(**_shared("qwen3_5_text", "Qwen3_5ForCausalLM", config, defaults), table=Qwen35Table)


def qwen3_5_moe_text(config: Mapping[str, Any]) -> MegatronFamily:
    """A language model of Qwen3.5 with experts in each layer, whose chosen shares always add up to one."""
    sizes = {"num_hidden_layers": 40, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8}
    defaults = {**SHARED_EXPERT, **sizes, "intermediate_size": SHARED_EXPERT["moe_intermediate_size"]}
    shared = _shared("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", config, defaults)
    shared["derived"] |= {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1}
    return DeltaFamily(**shared, table=Qwen35Table)


def _shared(name: str, class_name: str, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that all have in common."""
    own = well_formed(config, TYPES, {**DEFAULTS, **defaults})
    interval = own["full_attention_interval"]
    kinds = own["layer_types"] or [
        "linear_attention" if n % interval else "full_attention" for n in range(1, own["num_hidden_layers"] + 1)
    ]
    has_experts = "num_experts" in defaults
    return {
        "model_type": name,
        "class_name": class_name,
        "defaults": {"head_dim": 256, "max_position_embeddings": 32768, **defaults},
        "derived": {
            **{key: own[key] for key in DELTA},
            "layer_types": list(kinds),
            "attn_output_gate": True,
            "shared_expert_gate": has_experts,
        },
        "has_qk_norms": True,
        "layer_kinds": frozenset({"linear_attention"}),
        "transformer": {
            "layernorm_zero_centered_gamma": True,
            "attention_output_gate": True,
            **({"moe_shared_expert_gate": True} if has_experts else {}),
            **{key: own[key] for key in DELTA},
        },
        "types": TYPES,
        "required": {**NO_BIASES, **SILU},
    }
