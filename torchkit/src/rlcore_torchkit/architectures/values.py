"""The types of config.json's values that checks compute with."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from attrs import evolve

from rlcore.schema.constraints import Count, Positive, above_at_most, between
from rlcore.schema.structure import structure
from rlcore.spi.errors import Problem

_SIZES = ("hidden_size", "intermediate_size", "vocab_size", "num_key_value_heads", "head_dim", "max_position_embeddings")
_FLAGS = ("tie_word_embeddings", "norm_topk_prob", "attention_bias", "mlp_bias", "use_sliding_window")
_NUMBER = Annotated[float, above_at_most(0, 2**31)]
_THETA = Annotated[float, above_at_most(0, 1e30)]
_ROPE = {
    "rope_type": str,
    "type": str,
    "rope_theta": _THETA,
    "factor": _NUMBER,
    "original_max_position_embeddings": _NUMBER,
}
TYPES: Mapping[str, Any] = {
    **dict.fromkeys((*_SIZES, "decoder_sparse_step"), Positive),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads"), Annotated[int, between(1, 2**16)]),
    **dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"), Count),
    **dict.fromkeys(_FLAGS, bool),
    "mlp_only_layers": tuple[Count, ...],
    "layer_types": tuple[str, ...],
    "model_max_length": float,
    "rms_norm_eps": Annotated[float, between(0, 1)],
    "rope_theta": _THETA,
    **dict.fromkeys(("rope_parameters", "rope_scaling"), _ROPE),
}
"""The type of each value, by Llama's keys; a mapping for a table, and null is of every type."""


def value_problems(values: Mapping[str, Any], types: Mapping[str, Any] = TYPES) -> Iterator[Problem]:
    """Values of config.json that are not of their types, each with its key as the path."""
    for key, tp in types.items():
        if values.get(key) is None:
            continue
        is_table = isinstance(tp, Mapping)
        _, problems = structure(values[key], dict[str, object] if is_table else tp, key)
        yield from problems
        if is_table and not problems:
            yield from (evolve(problem, path=f"{key}.{problem.path}") for problem in value_problems(values[key], tp))
