"""Shapes and hidden states, against transformers in float32."""

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx_support import loaded

from rlcore_mlx.packing import PackedSequences
from rlcore_torchkit.transformers_import import import_transformers

ARCHITECTURES = ["qwen3", "qwen2", "llama", "mistral"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_hidden_states_and_names_are_those_of_transformers(architecture, tied, model_directory):
    import_transformers()
    from transformers import AutoModelForCausalLM

    directory = model_directory(architecture, tied)
    decoder, weights = loaded(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    parameters = dict(model.named_parameters())
    assert {name: tuple(parameter.shape) for name, parameter in parameters.items()} == decoder.shapes()
    np.testing.assert_array_equal(np.array(decoder.head(weights)), model.lm_head.weight.detach().numpy())
    tokens = np.random.default_rng(0).integers(0, decoder.dims.vocab_size, 33)
    with torch.no_grad():
        expected = model.model(torch.tensor(tokens)[None]).last_hidden_state[0].numpy()
    packed = PackedSequences.of(np.array([0, len(tokens)]))
    found = decoder.hidden(weights, mx.array(tokens), packed.positions, packed.attend)
    np.testing.assert_allclose(np.array(found), expected, atol=2e-5)
