"""Tiny random models of the families that the FSDP2 trainer trains by transformers' own classes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlcore_torchkit.testing.models import make_tokenizer

BASE: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 0,
}
EXPERTS: Mapping[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
SHARED = {**EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
GATED_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
}
MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}
WINDOW = {"sliding_window": 4, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}

DESCRIBED: Mapping[str, Mapping[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3_ROPE},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
}
"""Those that a family of torchkit describes, by model_type; the values are what their configs have beside BASE."""
TRAINED: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {**WINDOW, "query_pre_attn_scalar": 8},
    "gemma3_text": {**WINDOW, "query_pre_attn_scalar": 8},
    "phi3": {"sliding_window": 6},
    "smollm3": {"no_rope_layers": [1, 0]},
    "olmo2": {},
    "olmo3": WINDOW,
    "glm4_moe": SHARED,
    "gpt_oss": {**EXPERTS, **WINDOW, "rope_parameters": YARN},
    "deepseek_v3": {**SHARED, **LATENT, "num_key_value_heads": 4},
    "qwen3_next": {**EXPERTS, **GATED_DELTA, "layer_types": ["linear_attention", "full_attention"]},
    "nemotron_h": {
        **SHARED,
        **MAMBA,
        "layers_block_type": ["mamba", "attention", "moe"],
        "num_hidden_layers": 3,
        "moe_shared_expert_intermediate_size": 16,
        "num_key_value_heads": 2,
    },
    "phi": {},
    "cohere": {},
    "gpt2": {},
}
"""Those that train by their own class, in the same form."""
UNDIVIDED = ("gpt_oss", "nemotron_h", "gpt2")
"""Those of them that tensor ranks do not divide, since transformers has no plan for it."""
DIVIDED = tuple(name for name in TRAINED if name not in UNDIVIDED)

OWN_ATTENTION: Mapping[str, Mapping[str, Any]] = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "gptj": {"rotary_dim": 4, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "llama4_text": {
        **EXPERTS,
        "attention_chunk_size": 6,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 64,
        "interleave_moe_layer_step": 2,
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "stablelm": {},
}
"""Those whose classes compute attention by themselves, in the same form."""
REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {"bert": ({"is_decoder": False}, "BertLMHeadModel")}
"""Those that are refused when they are built: what their configs have, and words of the reason."""


def make_family(directory: Path, name: str, options: Mapping[str, Any]) -> Path:
    """Write a model with random weights of model_type `name`; returns the directory."""
    from transformers.utils import logging

    vocab_size = make_tokenizer(directory)
    config = AutoConfig.for_model(name, **{**BASE, "vocab_size": vocab_size, **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(buffer for name, buffer in model.named_buffers() if name in model.state_dict())):
            if tensor.ndim == 1:  # else norms are 1, biases and sinks 0, and say little of how they are computed
                tensor.add_(torch.linspace(-0.1, 0.1, len(tensor)))
    logging.disable_progress_bar()
    model.save_pretrained(directory)
    return directory
