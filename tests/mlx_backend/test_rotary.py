"""Frequencies of rotary embeddings, against transformers' own."""

import numpy as np
import pytest

from rlcore_mlx.rotary import rope_frequencies, rope_of
from rlcore_torchkit.transformers_import import import_transformers

KINDS = {
    "default": {},
    "linear": {"factor": 3.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_those_of_transformers(kind):
    import_transformers()
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": kind, "rope_theta": 500.0, **KINDS[kind]}
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, max_position_embeddings=512, rope_parameters=rope)
    expected = LlamaRotaryEmbedding(config).inv_freq.numpy()
    np.testing.assert_allclose(rope_frequencies({"rope_parameters": rope}, 32), expected, rtol=1e-6)


def test_the_older_form_of_config_says_the_same():
    old = {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 3.0}}
    assert rope_of(old)["rope_type"] == "linear"
    new = {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}}
    np.testing.assert_array_equal(rope_frequencies(old, 32), rope_frequencies(new, 32))
    assert rope_of({})["rope_theta"] == 10_000.0
