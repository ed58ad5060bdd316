"""What Megatron is told of a model."""

from typing import Any

import pytest
import torch
from attrs import frozen
from transformers import Gemma3TextConfig, Qwen3Config, Qwen3MoeConfig

from rlcore_megatron.families.family import MegatronFamily
from rlcore_megatron.families.models import find_family
from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_megatron.modules.model_config import local_frequencies, rotary_frequencies, transformer_config
from rlcore_megatron.setup.config import MegatronConfig


@frozen
class ContentAlone:
    """A transformers config whose attributes are none of Llama's names."""

    content: dict[str, Any]
    name_or_path: str = "model"

    def to_dict(self) -> dict[str, Any]:
        return self.content


def test_frequencies_are_worked_out_from_the_familys_own_keys() -> None:
    config = Qwen3MoeConfig(hidden_size=64, num_attention_heads=4, architectures=["Qwen3MoeForCausalLM"])
    expected = 10_000.0 ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(rotary_frequencies(ContentAlone(config.to_dict())), expected)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 8.0}], ids=str)
def test_gemma_3_has_frequencies_for_either_kind_of_layer(scaling: dict[str, Any] | None) -> None:
    """By the keys of the Hub's files, and by those that transformers makes of them."""
    keys = {"rope_theta": 1e6, "rope_local_base_freq": 500.0, "rope_scaling": scaling}
    options: dict[str, Any] = {"head_dim": 16, "num_hidden_layers": 2, "architectures": ["Gemma3ForCausalLM"]}
    config = Gemma3TextConfig(**options, **keys)
    steps = torch.arange(0, 16, 2, dtype=torch.float64) / 16
    found = rotary_frequencies(config), local_frequencies(config)
    expected = 1e6**-steps / (scaling or {"factor": 1.0})["factor"], 500.0**-steps
    for frequencies, wanted in zip(found, expected, strict=True):
        assert frequencies is not None
        torch.testing.assert_close(frequencies.double(), wanted, atol=0.0, rtol=1e-6)
    of_the_hub = find_family({"model_type": "gemma3_text", **keys}, "config.json")
    assert isinstance(of_the_hub, MegatronFamily)
    assert of_the_hub.local_theta == 500.0
    assert of_the_hub.rope == {"rope_theta": 1e6, **(scaling or {})}


@pytest.mark.parametrize(
    ("num_layers", "pipeline_layers", "expected"), [(4, (1, 3), (1, 3)), (5, "even", (3, 2)), (4, "even", None)]
)
def test_stages_have_the_layers_that_the_recipe_says(num_layers: int, pipeline_layers: Any, expected: Any) -> None:
    hf = Qwen3Config(hidden_size=32, num_attention_heads=2, num_hidden_layers=num_layers, architectures=["Qwen3ForCausalLM"])
    layout = ParallelLayout(rank=0, pipeline=2)
    found = transformer_config(hf, MegatronConfig(pipeline_layers=pipeline_layers), layout, "float32", "cpu")
    stages = found.pipeline_model_parallel_layout
    counts = None if stages is None else tuple(stages.get_num_layers_to_build(vp_stage=0, pp_rank=rank) for rank in range(2))
    assert counts == expected
