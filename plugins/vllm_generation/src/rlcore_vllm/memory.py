"""How much memory a model needs, worked out from its config.json."""

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from rlcore.spi.weights import ITEM_BYTES

CUDA_BLOCK_TOKENS, CPU_BLOCK_TOKENS = 16, 128
"""Tokens of one block of the KV cache, vLLM's defaults."""


@frozen(kw_only=True)
class ModelSize:
    """What one rank of an engine holds, in bytes."""

    weights: int
    kv_per_token: int

    def kv_bytes(self, num_tokens: int, block_tokens: int) -> int:
        """KV cache of one sequence: whole blocks, and one that vLLM keeps to itself."""
        return (-(-num_tokens // block_tokens) + 1) * block_tokens * self.kv_per_token


def model_size(model: Mapping[str, Any], dtype: str, *, tensor_parallel: int = 1, fp8: bool = False) -> ModelSize:
    """The size of a decoder with grouped-query attention and gated MLPs, dense or of experts, by its config.json.

    Norms and biases, a thousandth of the whole, are left out. Where there are fewer KV heads than ranks, each rank keeps one.
    """
    hidden, layers = int(model["hidden_size"]), int(model["num_hidden_layers"])
    heads = int(model["num_attention_heads"])
    kv_heads = int(model.get("num_key_value_heads") or heads)
    head_size = int(model.get("head_dim") or hidden // heads)
    item = ITEM_BYTES[dtype]
    tables = 1 if model.get("tie_word_embeddings") else 2
    embeddings = tables * int(model["vocab_size"]) * hidden * item
    attention = 2 * hidden * head_size * (heads + kv_heads)
    linear = layers * (attention + _mlp_parameters(model, hidden)) * (1 if fp8 else item)
    kv_per_token = 2 * layers * max(1, kv_heads // tensor_parallel) * head_size * item
    return ModelSize(weights=(embeddings + linear) // tensor_parallel, kv_per_token=kv_per_token)


def recorder_bytes(max_num_seqs: int, max_model_len: int) -> int:
    """Most bytes of the log-probabilities that one engine keeps on its device, in float32 rows.

    One row for each sequence in the making and one to spare, one for each that has been preempted, and `recorder_ended` of
    samples that wait to be fetched.
    """
    rows = 2 * max_num_seqs + 1 + recorder_ended(max_num_seqs)
    return rows * max_model_len * ITEM_BYTES["float32"]


def recorder_ended(max_num_seqs: int) -> int:
    """Samples that may have ended before their log-probabilities are fetched."""
    return max(1, max_num_seqs // 4)


def _mlp_parameters(model: Mapping[str, Any], hidden: int) -> int:
    """Of one layer."""
    experts = model.get("num_experts") or model.get("num_local_experts")
    if experts:
        width = int(model.get("moe_intermediate_size") or model["intermediate_size"])
        return int(experts) * (3 * hidden * width + hidden)
    return 3 * hidden * int(model["intermediate_size"])
