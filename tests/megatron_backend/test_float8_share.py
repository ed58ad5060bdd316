"""What of Megatron's own fields keeps products from 8 bits, as Megatron reads them."""

from typing import Any

import pytest
from megatron.core.fp8_utils import is_first_last_bf16_layer
from megatron.core.transformer.transformer_config import TransformerConfig

from rlcore_megatron.layouts.float8_share import weight_gradients_are_narrow, wide_layers
from rlcore_megatron.setup.config import MegatronConfig

NUM_LAYERS = 6


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"first_last_layers_bf16": True},
        {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 3},
        {"num_layers_at_start_in_bf16": 2},
    ],
)
def test_the_layers_that_stay_wide_are_megatrons(said: dict[str, Any]) -> None:
    built = TransformerConfig(num_layers=NUM_LAYERS, hidden_size=16, num_attention_heads=2, **said)
    at_start, at_end = wide_layers(MegatronConfig(transformer=said))
    wide = [layer < at_start or layer >= NUM_LAYERS - at_end for layer in range(NUM_LAYERS)]
    assert wide == [is_first_last_bf16_layer(built, layer) for layer in range(NUM_LAYERS)]


@pytest.mark.parametrize(
    ("said", "narrow"),
    [
        ({}, True),
        ({"fp8_wgrad": True}, True),
        ({"fp8_wgrad": False}, False),
        ({"fp8_wgrad": False, "fp8_recipe": "delayed"}, False),
        ({"fp8_wgrad": False, "fp8_recipe": "blockwise"}, True),
    ],
)
def test_gradients_of_weights_stay_wide_under_delayed_scaling_alone(said: dict[str, Any], narrow: bool) -> None:
    assert weight_gradients_are_narrow(MegatronConfig(transformer=said)) == narrow


def test_defaults_are_megatrons() -> None:
    built = TransformerConfig(num_layers=NUM_LAYERS, hidden_size=16, num_attention_heads=2)
    assert (built.fp8_recipe, built.fp8_wgrad, built.first_last_layers_bf16) == ("delayed", True, False)
