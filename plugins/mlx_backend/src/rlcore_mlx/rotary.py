"""Rotary position embeddings (arXiv:2104.09864), as config.json describes them; imports no MLX."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlcore.spi.arrays import Float32Array

ROPE_TYPES = ("default", "linear", "llama3")


def rope_of(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters in the content of a config.json, of the present form or of the one before it."""
    found = dict(model.get("rope_parameters") or model.get("rope_scaling") or {})
    found.setdefault("rope_theta", model.get("rope_theta") or 10_000.0)
    if "type" in found:
        found.setdefault("rope_type", found["type"])
    return found


def rope_frequencies(model: Mapping[str, Any], head_dim: int) -> Float32Array:
    """float32 [head_dim / 2]: radians that each pair of numbers turns by at every position."""
    rope = rope_of(model)
    frequencies = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    match rope.get("rope_type", "default"):
        case "linear":
            frequencies = frequencies / rope["factor"]
        case "llama3":
            frequencies = _llama3(frequencies, rope)
    return frequencies.astype(np.float32)


def _llama3(frequencies: Any, rope: Mapping[str, Any]) -> Any:
    """Slow turns slowed by the factor, quick ones kept, those between by a share of both (Llama 3.1)."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    num_turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    share = ((num_turns - low) / (high - low)).clip(0.0, 1.0)
    return (1 - share) * frequencies / rope["factor"] + share * frequencies
