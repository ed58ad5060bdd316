"""gpt-oss (arXiv:2508.10925): experts with biases and a clamped gate, sinks, and a window in every second layer."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from rlcore.schema.constraints import Positive
from rlcore_megatron.families.family import MegatronFamily, well_formed
from rlcore_megatron.families.weight_source import HfTensor, Source, Stack
from rlcore_megatron.families.weight_table import WeightTable, expert_name
from rlcore_torchkit.architectures.modules import ModuleNames

TYPES: Mapping[str, Any] = {
    "attention_bias": bool,
    "sliding_window": Positive,
    "swiglu_alpha": float,
    "swiglu_limit": float,
    "layer_types": tuple[str, ...],
    "num_hidden_layers": Positive,
    "intermediate_size": Positive,
}
DEFAULTS: Mapping[str, Any] = {
    "sliding_window": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "layer_types": None,
    "num_hidden_layers": 36,
    "intermediate_size": 2880,
}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
    "rope_theta": 150000.0,
}
PARTS = ("gate", "up")


class GptOssTable(WeightTable):
    """All experts of a layer are in one tensor, transposed, and the rows of gates and columns take turns."""

    def attention(self, layer: int) -> Iterator[Source]:
        """With the bias of the output, and the sinks."""
        yield from super().attention(layer)
        modules, width = self.family.modules, (self.dims.hidden_size,)
        yield self.in_layer(layer, "self_attention.linear_proj.bias", modules.output, width, suffix=".bias")
        sinks, heads = "self_attention.core_attention.softmax_offset", (self.dims.num_heads,)
        yield self.in_layer(layer, sinks, modules.attention, heads, tp_dim=0, suffix=".sinks")

    def experts(self, layer: int) -> Iterator[Source]:
        """The experts, one tensor of theirs after the other, and the router."""
        dims, modules = self.dims, self.family.modules
        hidden, width = dims.hidden_size, dims.moe_intermediate_size
        for kind, expert in product(("weight", "bias"), range(dims.num_experts)):
            columns = (hidden,) if kind == "weight" else ()
            parts = [self._stacked(layer, "gate_up_proj", kind, expert, (width, *columns), part) for part in range(len(PARTS))]
            yield _expert_source(layer, expert, f"linear_fc1.{kind}", *parts)
        for kind, expert in product(("weight", "bias"), range(dims.num_experts)):
            columns = (width,) if kind == "weight" else ()
            down = self._stacked(layer, "down_proj", kind, expert, (hidden, *columns))
            yield _expert_source(layer, expert, f"linear_fc2.{kind}", down)
        yield self.in_layer(layer, "mlp.router.weight", modules.router, (dims.num_experts, hidden))
        yield self.in_layer(layer, "mlp.router.bias", modules.router, (dims.num_experts,), suffix=".bias")

    def _stacked(
        self, layer: int, name: str, kind: str, expert: int, shape: tuple[int, ...], part: int | None = None
    ) -> HfTensor:
        """One expert's share of a tensor, or of that the gates' or the other columns'."""
        num_parts = 1 if part is None else len(PARTS)
        whole = f"{self.family.modules.layers}.{layer}.{self.family.modules.experts}.{name}"
        whole += "" if kind == "weight" else "_bias"
        return HfTensor(
            name=f"{whole}.{expert}.{'all' if part is None else PARTS[part]}",
            shape=shape,
            place=Stack(
                name=whole,
                shape=(self.dims.num_experts, *shape[1:], shape[0] * num_parts),
                expert=expert,
                part=part or 0,
                num_parts=num_parts,
            ),
        )


def _expert_source(layer: int, expert: int, parameter: str, *tensors: HfTensor) -> Source:
    module, _, kind = parameter.partition(".")
    name = f"decoder.layers.{layer}.{expert_name(expert, module, kind)}"
    return Source(parameter=name, tensors=tensors, layer=layer, expert=expert)


def gpt_oss(config: Mapping[str, Any]) -> MegatronFamily:
    """gpt-oss, whose weights have been saved in bfloat16 or float32."""
    own = well_formed(config, TYPES, DEFAULTS)
    kinds = own["layer_types"] or [("sliding_attention", "full_attention")[n % 2] for n in range(own["num_hidden_layers"])]
    return MegatronFamily(
        model_type="gpt_oss",
        class_name="GptOssForCausalLM",
        modules=ModuleNames(router="mlp.router"),
        table=GptOssTable,
        aliases={"num_experts": "num_local_experts"},
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "num_experts": 128,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "rope_parameters": YARN,
        },
        has_qkv_biases=True,
        has_windows=True,
        derived={"moe_intermediate_size": own["intermediate_size"]},
        transformer={"activation_func_clamp_value": own["swiglu_limit"], "glu_linear_offset": 1.0},
        types=TYPES,
        required={"attention_bias": (True, "all linear layers have biases")},
        windows=tuple(own["sliding_window"] if kind == "sliding_attention" else None for kind in kinds),
        has_sinks=True,
        has_all_biases=True,
        swish_beta=own["swiglu_alpha"],
        rotary=("default", "linear", "llama3", "yarn"),
    )
