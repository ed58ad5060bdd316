"""Options of tiny configurations that the general rules do not find."""

from collections.abc import Mapping
from typing import Any

from rlcore_torchkit.testing.families.tiny import VOCAB_SIZE

_SHARED_LAYERS = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
_UNPADDED = {"vocab_size": VOCAB_SIZE + 4, "unpadded_vocab_size": VOCAB_SIZE, "n_layers_per_attn_res_block": 1}
_UNSHARED = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_hidden_layers": 2}
_NO_DEFAULT = "its configuration has no default, and no tiny one is known"
UNTRIED: Mapping[str, str] = {"musicgen": _NO_DEFAULT, "musicgen_melody": _NO_DEFAULT}
"""Families of which no tiny model can be made, with the reason."""
CORRECTIONS: Mapping[str, Mapping[str, Any]] = {
    "big_bird": {"attention_type": "original_full"},
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3, 4]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
        "max_seq_len": 128,
    },
    "dory": {
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma3n_text": _SHARED_LAYERS,
    "gemma4_text": _SHARED_LAYERS,
    "gemma4_unified_text": _SHARED_LAYERS,
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **_UNSHARED}},
    "gemma4_unified_assistant": {"text_config": {"model_type": "gemma4_unified_text", **_UNSHARED}},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_key_value_heads": 4},
    "inkling2_loop_text": {
        **_UNPADDED,
        "num_hidden_layers": 4,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
    },
    "inkling2_text": _UNPADDED,
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "local"]},
    "xlm": {"causal": True},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "n_mamba_heads": 8,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zaya": {"num_experts_per_tok": 1},
}
