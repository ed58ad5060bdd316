"""MiniMax-M2: experts in each layer, chosen by sigmoid scores with a correction bias, and norms over all heads together."""

from collections.abc import Iterator, Mapping
from typing import Any

from rlcore.schema.constraints import Positive
from rlcore_megatron.families.family import NO_BIASES, SILU, MegatronFamily, well_formed
from rlcore_megatron.families.glm4_moe import SEVERAL
from rlcore_megatron.families.weight_source import Source
from rlcore_megatron.families.weight_table import WeightTable
from rlcore_torchkit.architectures.modules import ModuleNames

TYPES: Mapping[str, Any] = {"intermediate_size": Positive, "router_jitter_noise": float, "rotary_dim": Positive}


class MiniMaxTable(WeightTable):
    """Attention that normalises all heads of queries together, and all heads of keys."""

    def attention(self, layer: int) -> Iterator[Source]:
        """Queries, keys and values, the output, and both norms, which each tensor rank has whole."""
        yield from super().attention(layer)
        dims, modules = self.dims, self.family.modules
        for ours, theirs, heads in (("q", modules.query_norm, dims.num_heads), ("k", modules.key_norm, dims.num_kv_heads)):
            yield self.in_layer(layer, f"self_attention.{ours}_layernorm.weight", theirs, (heads * dims.head_dim,))


def minimax_m2(config: Mapping[str, Any]) -> MegatronFamily:
    """MiniMax-M2."""
    own = well_formed(config, TYPES, {"intermediate_size": 1536})
    block = "block_sparse_moe"
    return MegatronFamily(
        model_type="minimax_m2",
        class_name="MiniMaxM2ForCausalLM",
        modules=ModuleNames(
            mlp=block,
            router=f"{block}.gate",
            correction_bias=f"{block}.e_score_correction_bias",
            experts=f"{block}.experts",
            gate="w1",
            up="w3",
            down="w2",
        ),
        aliases={"num_experts": "num_local_experts"},
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 196608,
            "num_experts": 256,
            "num_experts_per_tok": 8,
        },
        has_correction_bias=True,
        window_key="sliding_window",
        table=MiniMaxTable,
        derived={
            "moe_intermediate_size": own["intermediate_size"],
            "norm_topk_prob": True,
            "mlp_only_layers": [],
            "wide_qk_norms": True,
        },
        transformer={"moe_router_score_function": "sigmoid"},
        types=TYPES,
        required={
            **NO_BIASES,
            **SILU,
            "router_jitter_noise": (0.0, "routers see hidden states as they are"),
            **(SEVERAL if config.get("num_experts_per_tok") == 1 else {}),
        },
    )
