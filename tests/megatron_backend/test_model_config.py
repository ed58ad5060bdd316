"""What Megatron is told of a model."""

from typing import Any

import torch
from attrs import frozen
from transformers import Qwen3MoeConfig

from rlcore_megatron.model_config import rotary_frequencies


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
