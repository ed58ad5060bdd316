"""A key that config.json lacks has the default of transformers' own classes."""

from typing import Any

import pytest
from markdown_blocks import ROOT, blocks
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rlcore.spi import Problem
from rlcore_torchkit.architectures.architecture import Architecture
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.architectures.registry import find_architecture

SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 128, "vocab_size": 96}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "tie_word_embeddings": True}
WINDOW = {"sliding_window": None, "use_sliding_window": False, "layer_types": ["full_attention"] * 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS |= {"decoder_sparse_step": 2, "mlp_only_layers": [1], "norm_topk_prob": True}
NEED_NOT_BE_THERE = [*list(SIZES)[5:], *WINDOW]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "lfm2")


def family_of(model_type: str) -> Architecture:
    if model_type == "lfm2":  # of another distribution
        text = next(block.text for block in blocks(ROOT / "docs" / "plugins.md") if "ARCHITECTURE =" in block.text)
        module: dict[str, Any] = {}
        exec(text, module)
        return module["ARCHITECTURE"]
    found = find_architecture({"model_type": model_type}, "config.json")
    assert isinstance(found, Architecture)
    return found


def read(family: Architecture, config: dict[str, Any]) -> tuple[ModelDims | None, Any, int]:
    """What checks know: the sizes, the positions, and how much keeps the model from being the family's."""
    standard = family.standard(config)
    problems = family.problems(config | {"architectures": [family.class_name]}, "config.json")
    return ModelDims.of(standard), standard.get("max_position_embeddings"), len(list(problems))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_missing_key_stands_for_what_transformers_takes(model_type: str) -> None:
    family = family_of(model_type)
    whole = SIZES | WINDOW | (EXPERTS if model_type == "qwen3_moe" else {})
    for missing in [*NEED_NOT_BE_THERE, *(EXPERTS if model_type == "qwen3_moe" else ()), None]:
        config = {key: value for key, value in whole.items() if key != missing}
        assert read(family, config) == read(family, CONFIG_MAPPING[model_type](**config).to_dict()), missing


def test_a_mistral_without_a_window_key_has_one() -> None:
    family = family_of("mistral")
    (problem,) = family.problems({"architectures": [family.class_name]}, "config.json")
    assert isinstance(problem, Problem)
    assert problem.found == "no sliding_window, which stands for 4096"
