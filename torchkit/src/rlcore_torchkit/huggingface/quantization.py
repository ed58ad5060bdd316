"""Checkpoints with quantised weights, which no trainer can begin with."""

from collections.abc import Mapping
from typing import Any

from rlcore.spi.errors import Problem
from rlcore_model_files.weight_headers import TEXT_KEYS

KEYS = ("quantization_config", "compression_config", "quantization")
"""Keys of config.json; compressed-tensors wrote the second one, and MLX the third."""
_ORIGINAL = "Take the model that it was quantised from"
_DEQUANTISED = {
    "bitsandbytes": "load it with transformers, call its dequantize(), and save it",
    "compressed-tensors": "load it with transformers' CompressedTensorsConfig(dequantize=True), and save it",
    "fp8": "load it with transformers' FineGrainedFP8Config(dequantize=True), and save it",
    "higgs": "load it with transformers, call its dequantize(), and save it",
    "hqq": "load it with transformers, call its dequantize(), and save it",
    "mxfp4": "load it with transformers' Mxfp4Config(dequantize=True), and save it",
    "mxfp8": "load it with transformers' FineGrainedFP8Config(dequantize=True), and save it",
}
"""How transformers makes bfloat16 of the weights, by the method that quantised them; it has no way for the others."""


def quantization_problems(path: str, config: Mapping[str, Any]) -> list[Problem]:
    """Return the problem of quantised weights, by the content of the config.json at `path`; none where it names none."""
    parts = [config, *(part for key in TEXT_KEYS if isinstance(part := config.get(key), Mapping))]
    named = next(((key, part[key]) for part in parts for key in KEYS if part.get(key)), None)
    if named is None:
        return []
    key, content = named
    method = _method(content)
    way = _DEQUANTISED.get(method)
    return [
        Problem(
            path=path,
            found=f"weights quantised by {method or 'an unknown method'}, as {key} says",
            expected="weights in float32 or bfloat16",
            remedy=f"{_ORIGINAL}, or {way}" if way else _ORIGINAL,
        )
    ]


def _method(content: object) -> str:
    """Return the name of the method; of bitsandbytes, older files say only how many bits it loads."""
    if not isinstance(content, Mapping):
        return ""
    if content.get("load_in_8bit") or content.get("load_in_4bit"):
        return "bitsandbytes"
    return str(content.get("quant_method") or content.get("quant_algo") or content.get("quant_type") or "")
