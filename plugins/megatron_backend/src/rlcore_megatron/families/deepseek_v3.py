"""DeepSeek-V3 (arXiv:2412.19437): multi-latent attention, and experts of which some nodes' are chosen by their scores.

The layer that predicts further tokens (num_nextn_predict_layers) is neither trained nor exported, as by transformers, unless
`mtp` of the section says so.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import frozen

from rlcore.schema.constraints import Count, Positive
from rlcore.spi import Problem
from rlcore_megatron.families.family import NO_BIASES, REMEDY, SILU, MegatronFamily, well_formed
from rlcore_megatron.families.weight_table import LatentWeightTable
from rlcore_torchkit.architectures.modules import ModuleNames

DEFAULTS: Mapping[str, Any] = {
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""As transformers takes them where config.json lacks a key."""
ROPE_TYPES: Mapping[str, Any] = dict.fromkeys(("factor", "mscale", "mscale_all_dim"), float)
TYPES: Mapping[str, Any] = {
    **dict.fromkeys(DEFAULTS, Positive),
    **dict.fromkeys(("first_k_dense_replace", "n_shared_experts", "moe_intermediate_size"), Count),
    "routed_scaling_factor": float,
    "rope_interleave": bool,
    "num_nextn_predict_layers": Count,
    **dict.fromkeys(("rope_parameters", "rope_scaling"), ROPE_TYPES),
}
CHOSEN_FOR_A_GROUP = 2
"""Scores that a group of experts is chosen by, those of its best; Megatron adds up as many as a token chooses of a group."""


def deepseek_v3(config: Mapping[str, Any]) -> MegatronFamily:
    """DeepSeek-V3, and others of its form, as Moonlight."""
    own = well_formed(config, TYPES, DEFAULTS)
    if config.get("q_lora_rank", own["q_lora_rank"]) is None:
        own["q_lora_rank"] = None
    return DeepseekV3(
        model_type="deepseek_v3",
        class_name="DeepseekV3ForCausalLM",
        modules=ModuleNames(shared_expert="mlp.shared_experts"),
        aliases={"num_experts": "n_routed_experts"},
        defaults={
            "num_attention_heads": DEFAULTS["num_attention_heads"],
            "num_key_value_heads": DEFAULTS["num_attention_heads"],
            "max_position_embeddings": 4096,
            "num_experts_per_tok": DEFAULTS["num_experts_per_tok"],
            "moe_intermediate_size": DEFAULTS["moe_intermediate_size"],
            "norm_topk_prob": True,
        },
        has_correction_bias=True,
        has_multi_token_head=True,
        rotary=("default", "linear", "llama3", "yarn"),
        window_key="sliding_window",
        derived={
            **{key: own[key] for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
            "num_experts": own["n_routed_experts"],
            "mlp_only_layers": list(range(own["first_k_dense_replace"])),
            "shared_expert_intermediate_size": own["n_shared_experts"] * own["moe_intermediate_size"],
        },
        transformer={
            "multi_latent_attention": True,
            "q_lora_rank": own["q_lora_rank"],
            "kv_lora_rank": own["kv_lora_rank"],
            "qk_head_dim": own["qk_nope_head_dim"],
            "qk_pos_emb_head_dim": own["qk_rope_head_dim"],
            "v_head_dim": own["v_head_dim"],
            "num_query_groups": own["num_attention_heads"],
            "qk_layernorm": True,
            "rope_type": "yarn",  # whose angles come with a factor; they are ours
            **_temperature(config),
            "moe_router_score_function": "sigmoid",
            "moe_router_topk_scaling_factor": own["routed_scaling_factor"],
            **_limits(own),
        },
        table=LatentWeightTable,
        types=TYPES,
        required={
            **NO_BIASES,
            **SILU,
            "norm_topk_prob": (True, "the chosen experts' shares add up to one before they are scaled"),
            "rope_interleave": (True, "rotation of neighbouring elements"),
            "scoring_func": ("sigmoid", "the scores that experts are chosen by"),
            "topk_method": ("noaux_tc", "the choice by scores and a correction bias"),
            "moe_layer_freq": (1, "experts in each layer behind the first dense ones"),
        },
    )


@frozen(kw_only=True)
class DeepseekV3(MegatronFamily):
    """The family as the model of one config.json has it."""

    def layer_problems(self, standard: Mapping[str, Any], path: str) -> Iterator[Problem]:
        """As for all families, and how experts are chosen that Megatron would choose otherwise."""
        yield from super().layer_problems(standard, path)
        own = well_formed(standard, TYPES, DEFAULTS)
        heads, key_heads = own["num_attention_heads"], standard.get("num_key_value_heads")
        if key_heads not in (None, heads):
            found = f"num_key_value_heads = {key_heads}, with num_attention_heads = {heads}"
            expected = f"{heads}: in multi-latent attention each head has its own keys"
            yield Problem(path=path, found=found, expected=expected, remedy=REMEDY)
        chosen, groups, of_groups = own["num_experts_per_tok"], own["n_group"], own["topk_group"]
        if chosen == 1:
            found, expected = "num_experts_per_tok = 1", "at least 2: Megatron gives a single expert its score, and not all"
            yield Problem(path=path, found=found, expected=expected, remedy=REMEDY)
        if of_groups > groups or own["n_routed_experts"] % groups:
            found = f"n_group = {groups} and topk_group = {of_groups}, with n_routed_experts = {own['n_routed_experts']}"
            yield Problem(path=path, found=found, expected="groups that divide the experts, and at most as many chosen")
        elif of_groups < groups and chosen // of_groups != CHOSEN_FOR_A_GROUP:
            found = f"num_experts_per_tok = {chosen}, with topk_group = {of_groups} of n_group = {groups}"
            expected = f"{CHOSEN_FOR_A_GROUP} experts for each chosen group: Megatron chooses groups by as many scores"
            yield Problem(path=path, found=found, expected=expected, remedy=REMEDY)
        kind, factor = _kind(standard), _rope(standard).get("factor")
        if kind != "default" and factor is None:
            yield Problem(path=path, found=f'rope_type = "{kind}" without a factor', expected="a factor beside it")


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json's table of rotation, under the key that transformers writes or that of the Hub's older files."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return found if isinstance(found, Mapping) else {}


def _kind(config: Mapping[str, Any]) -> str:
    rope = _rope(config)
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _temperature(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the value that Megatron works out the factor of attention's scores from: (0.1 · mscale_all_dim · log(factor) + 1)²
    / √width, as transformers does for every kind of scaled rotation."""
    rope = well_formed(_rope(config), ROPE_TYPES, {"factor": 1.0, "mscale_all_dim": 0.0})
    scales = _kind(config) != "default"
    return {
        "rotary_scaling_factor": float(rope["factor"]) if scales else 1.0,
        "mscale_all_dim": float(rope["mscale_all_dim"]),
    }


def _limits(own: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of groups of experts, and how many a token chooses; nothing where it chooses all."""
    if own["n_group"] == own["topk_group"]:
        return {}
    return {"moe_router_num_groups": own["n_group"], "moe_router_group_topk": own["topk_group"]}
