"""Sizes of tiny models that vLLM's kernels take, and what vLLM alone reads of a configuration."""

from collections.abc import Mapping
from typing import Any

from rlcore_torchkit.testing.families.tiny import SIZES as SMALLEST

_SCALED = {8: 32, 16: 64, 32: 128, 64: 128}
"""Heads of 32, the smallest of vLLM's attention on a CPU, four of them in a hidden state, and what goes with these."""
_KEPT = frozenset({"mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "index_n_heads"})
SIZES: Mapping[str, int] = {
    **{name: value if name in _KEPT else _SCALED.get(value, value) for name, value in SMALLEST.items()},
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "mamba_d_ssm": 256,
    "qk_head_dim": 192,
}
"""Values of tiny configurations by the names of fields."""
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "falcon": {"ffn_hidden_size": 512},
    "hy_v3": {"first_k_dense_replace": 1, "expert_hidden_dim": 64, "route_norm": True, "qk_norm": True},
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "glm4_moe": {"head_dim": 32},
    "deepseek_v4": {"head_dim": 128},
    "deepseek_v2": {"n_group": 1, "topk_group": 1},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "conv_dim": 128, "block_dim": 128},
    "longcat_flash": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
    "mamba2": {"num_heads": 8, "head_dim": 32},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 0],
        "layernorm_epsilon": 1e-6,
        "moe_layer_freq": [0, 1, 1],
        "sliding_window_size": 6,
        "swa_head_dim": 32,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "add_swa_attention_sink_bias": True,
        "rope_theta": 5_000_000.0,
        "swa_rope_theta": 10_000.0,
        "partial_rotary_factor": 0.334,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "output_gate_type": "silu",
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "n_mamba_heads": 8,
        "num_key_value_heads": 4,
        "attention_hidden_size": 256,
        "attention_head_dim": 64,
    },
}
"""Further options by model_type."""
CPU_OPTIONS: Mapping[str, Mapping[str, Any]] = {}
"""Further options by model_type on a CPU."""
