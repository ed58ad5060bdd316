"""Tiny random models of the families that Megatron computes beside those that are described for all trainers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decoder_families import EXPERTS, GATED_DELTA, LATENT, SHARED, WINDOW, YARN, make_family
from transformers import GptOssConfig

NARROW_SCORES: Mapping[str, Any] = {"sliding_window": 4, "query_pre_attn_scalar": 5, "num_hidden_layers": 4}
"""Of Gemma: scores are not divided by the root of the heads' width."""
GATE_LIMIT = 0.2 if hasattr(GptOssConfig, "swiglu_limit") else 7.0
"""Of gpt-oss: up to 5.17 transformers, which tests compare with, clamps at 7 whatever a config says."""
DELTA: Mapping[str, Any] = {
    **GATED_DELTA,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 12,
    "full_attention_interval": 2,
    "num_hidden_layers": 4,
}
INDEXED: Mapping[str, Any] = {
    **SHARED,
    **LATENT,
    **dict.fromkeys(("n_routed_experts", "num_local_experts", "num_experts"), 8),
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "index_topk": 3,
    "index_n_heads": 4,
    "index_head_dim": 12,
    "num_hidden_layers": 4,
    "tie_word_embeddings": False,
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": {
        **SHARED,
        **LATENT,
        **dict.fromkeys(("n_routed_experts", "num_local_experts", "num_experts"), 8),
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
        "rms_norm_eps": 1e-4,
        "num_hidden_layers": 4,
        "tie_word_embeddings": False,
    },
    "deepseek_v32": {**INDEXED, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    "gemma2": {
        **NARROW_SCORES,
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 0.5,
    },
    "gemma3_text": {
        **NARROW_SCORES,
        "sliding_window_pattern": 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "glm4_moe": {
        **SHARED,
        "attention_bias": True,
        "use_qk_norm": True,
        "routed_scaling_factor": 1.5,
        "n_shared_experts": 2,
        "num_hidden_layers": 4,
        "tie_word_embeddings": False,
    },
    "glm_moe_dsa": {**INDEXED, "n_group": 1, "topk_group": 1, "index_topk_freq": 2, "index_skip_topk_offset": 1},
    "gpt_oss": {
        **EXPERTS,
        **WINDOW,
        "rope_parameters": YARN,
        "swiglu_limit": GATE_LIMIT,
        "num_hidden_layers": 4,
        "layer_types": None,
        "tie_word_embeddings": False,
    },
    "minimax_m2": {
        **EXPERTS,
        "rotary_dim": 4,
        "num_hidden_layers": 4,
        "intermediate_size": 16,
        "tie_word_embeddings": False,
    },
    "qwen3_5_moe_text": {**EXPERTS, **DELTA},
    "qwen3_5_text": {**DELTA, "tie_word_embeddings": True},
    "qwen3_next": {**EXPERTS, **DELTA, "norm_topk_prob": True},
}
"""What their configs have beside `decoder_families.BASE`, by model_type."""
DENSE = ("gemma2", "gemma3_text", "qwen3_5_text")
WITH_EXPERTS = tuple(name for name in FAMILIES if name not in DENSE)
WITHOUT_ADAPTERS = ("deepseek_v32", "glm_moe_dsa", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
WITH_ADAPTERS = tuple(name for name in FAMILIES if name not in WITHOUT_ADAPTERS)
FIXED = "e_score_correction_bias"
"""The end of the names of tensors that do not train, and keep their dtype."""
FROZEN = "self_attn.indexer."
"""A part of the names of tensors that do not train either."""


def make_own(directory: Path, name: str, **options: Any) -> Path:
    """Write a model of such a family; returns the directory."""
    return make_family(directory, name, {"initializer_range": 0.08, **FAMILIES[name], **options})
