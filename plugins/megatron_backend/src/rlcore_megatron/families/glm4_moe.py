"""GLM-4.5 and 4.6 (arXiv:2508.06471): DeepSeek's experts behind grouped-query attention with partial rotation."""

from collections.abc import Mapping
from typing import Any

from rlcore.schema.constraints import Count, Positive
from rlcore_megatron.families.family import NO_MLP_BIAS, SILU, MegatronFamily, well_formed
from rlcore_torchkit.architectures.modules import ModuleNames

TYPES: Mapping[str, Any] = {
    "first_k_dense_replace": Count,
    "n_shared_experts": Count,
    "use_qk_norm": bool,
    "attention_bias": bool,
    "routed_scaling_factor": float,
    "n_group": Positive,
    "num_nextn_predict_layers": Count,
}
DEFAULTS: Mapping[str, Any] = {
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "use_qk_norm": False,
    "attention_bias": False,
    "routed_scaling_factor": 1.0,
    "moe_intermediate_size": 1408,
}
SEVERAL = {"num_experts_per_tok": (2, "or more: Megatron does not normalise the share of one expert")}


def glm4_moe(config: Mapping[str, Any]) -> MegatronFamily:
    """GLM-4.5, which leaves open whether queries and keys have norms, and queries, keys and values biases."""
    own = well_formed(config, {**TYPES, "moe_intermediate_size": Count}, DEFAULTS)
    return MegatronFamily(
        model_type="glm4_moe",
        class_name="Glm4MoeForCausalLM",
        modules=ModuleNames(shared_expert="mlp.shared_experts"),
        aliases={"num_experts": "n_routed_experts"},
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": DEFAULTS["moe_intermediate_size"],
            "norm_topk_prob": True,
        },
        has_qkv_biases=own["attention_bias"],
        has_qk_norms=own["use_qk_norm"],
        has_correction_bias=True,
        has_multi_token_head=True,
        window_key="sliding_window",
        derived={
            "mlp_only_layers": list(range(own["first_k_dense_replace"])),
            "shared_expert_intermediate_size": own["n_shared_experts"] * own["moe_intermediate_size"],
        },
        transformer={
            "moe_router_score_function": "sigmoid",
            "moe_router_topk_scaling_factor": own["routed_scaling_factor"],
        },
        types=TYPES,
        required={
            **NO_MLP_BIAS,
            **SILU,
            "norm_topk_prob": (True, "the chosen experts' shares add up to one before they are scaled"),
            "n_group": (1, "a token chooses among all experts"),
            **(SEVERAL if config.get("num_experts_per_tok") == 1 else {}),
        },
    )
