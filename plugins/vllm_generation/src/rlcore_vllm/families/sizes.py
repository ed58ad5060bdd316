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
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "mamba_d_ssm": 256,
}
"""Values of tiny configurations by the names of fields."""
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "falcon": {"ffn_hidden_size": 512},
    "hy_v3": {"first_k_dense_replace": 1, "expert_hidden_dim": 64, "route_norm": True, "qk_norm": True},
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "glm4_moe": {"head_dim": 32},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}
"""Further options by model_type."""
CPU_OPTIONS: Mapping[str, Mapping[str, Any]] = {}
"""Further options by model_type on a CPU."""
