"""Tiny random models of the families that Megatron computes beside those that are described for all trainers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decoder_families import SHARED, make_family

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "glm4_moe": {
        **SHARED,
        "attention_bias": True,
        "use_qk_norm": True,
        "routed_scaling_factor": 1.5,
        "n_shared_experts": 2,
        "num_hidden_layers": 4,
        "tie_word_embeddings": False,
    },
}
"""What their configs have beside `decoder_families.BASE`, by model_type."""
FIXED = "e_score_correction_bias"
"""The end of the names of tensors that do not train, and keep their dtype."""


def make_own(directory: Path, name: str, **options: Any) -> Path:
    """Write a model of such a family; returns the directory."""
    return make_family(directory, name, {"initializer_range": 0.08, **FAMILIES[name], **options})
