"""Quantised checkpoints are refused by their method, with what makes a start of them."""

import pytest
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from rlcore_torchkit.huggingface.quantization import quantization_problems

ORIGINAL = "Take the model that it was quantised from"
METHODS = {name.partition("_4bit")[0].partition("_8bit")[0] for name in AUTO_QUANTIZATION_CONFIG_MAPPING}


@pytest.mark.parametrize("method", sorted({*METHODS, "modelopt", "a-new-one"}))
def test_each_method_is_refused_by_its_name(method: str) -> None:
    (problem,) = quantization_problems("model/config.json", {"quantization_config": {"quant_method": method}})
    assert (problem.path, problem.expected) == ("model/config.json", "weights in float32 or bfloat16")
    assert problem.found == f"weights quantised by {method}, as quantization_config says"
    assert problem.remedy.startswith(ORIGINAL)


FORMS = {
    "of a language model in a larger one": (
        {"text_config": {"quantization_config": {"quant_method": "compressed-tensors"}}},
        "compressed-tensors, as quantization_config says",
        "CompressedTensorsConfig(dequantize=True)",
    ),
    "under its first key": ({"compression_config": {"quant_method": "x"}}, "x, as compression_config says", ORIGINAL),
    "of MLX": ({"quantization": {"group_size": 64, "bits": 4}}, "an unknown method, as quantization says", ORIGINAL),
    "of bitsandbytes' first files": ({"quantization_config": {"load_in_8bit": True}}, "bitsandbytes", "dequantize()"),
    "of ModelOpt": ({"quantization_config": {"quant_algo": "FP8"}}, "FP8", ORIGINAL),
    "without a name": ({"quantization_config": {"bits": 4}}, "an unknown method", ORIGINAL),
    "that is no table": ({"quantization_config": "int4"}, "an unknown method", ORIGINAL),
    "of float8": ({"quantization_config": {"quant_method": "fp8"}}, "fp8", "FineGrainedFP8Config(dequantize=True)"),
    "of experts": ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4", "Mxfp4Config(dequantize=True)"),
}


@pytest.mark.parametrize(("config", "found", "remedy"), FORMS.values(), ids=FORMS)
def test_each_form_is_found(config: dict, found: str, remedy: str) -> None:
    (problem,) = quantization_problems("model", config)
    assert problem.found.startswith(f"weights quantised by {found}")
    assert remedy in problem.remedy


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}, {"text_config": {}}, {"text_config": None}])
def test_plain_weights_are_fine(config: dict) -> None:
    assert quantization_problems("model", config) == []
