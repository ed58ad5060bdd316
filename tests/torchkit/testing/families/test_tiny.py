"""Tiny configurations by the names of fields."""

import pytest
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rlcore.spi import ModelError
from rlcore_torchkit.requirements import FIRST_VERSIONS
from rlcore_torchkit.testing.families.corrections import CORRECTIONS
from rlcore_torchkit.testing.families.tiny import VOCAB_SIZE, tiny_options
from rlcore_torchkit.testing.families.tiny_model import make_tiny


@pytest.mark.parametrize(
    ("name", "key", "expected"),
    [
        ("llama", "hidden_size", 32),
        ("gpt2", "n_embd", 32),
        ("llama", "eos_token_id", 0),
        ("gemma3", "image_token_index", VOCAB_SIZE - 3),
        ("gemma3_text", "layer_types", ["sliding_attention", "full_attention"]),
        ("deepseek_v32", "mlp_layer_types", ["dense", "sparse"]),
        ("deepseek_v3", "num_key_value_heads", 4),
        ("hunyuan_v1_dense", "head_dim", 8),
        ("qwen3", "num_hidden_layers", 2),
    ],
)
def test_fields_are_tiny(name, key, expected):
    assert tiny_options(CONFIG_MAPPING[name](), {})[key] == expected


def test_parts_are_tiny_too_and_corrections_come_last():
    options = tiny_options(AutoConfig.for_model("gemma3"), {"vocab_size": 7})
    assert options["text_config"]["hidden_size"] == options["vision_config"]["hidden_size"] == 32
    assert options["vocab_size"] == 7


def test_corrections_name_families_that_there_are():
    assert CORRECTIONS.keys() - FIRST_VERSIONS.keys() <= set(CONFIG_MAPPING.keys())


def test_a_class_that_refuses_its_own_defaults_is_tried_with_corrected_ones(tmp_path):
    with pytest.raises(ModelError) as caught:
        make_tiny("gemma4_assistant", "Gemma4AssistantForCausalLM", tmp_path / "model")
    assert [problem.found for problem in caught.value.problems] == ["a text_config, as models of images or sound have"]
