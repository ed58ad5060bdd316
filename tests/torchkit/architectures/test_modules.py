"""Names of modules, against transformers' own classes of each family."""

from collections.abc import Callable
from typing import Any

import torch

from rlcore_torchkit.huggingface.models import architecture_of, dims_of


def test_every_name_is_that_of_a_module(architecture: str, plain_model: Callable[[str], Any]) -> None:
    model = plain_model(architecture)
    family, dims = architecture_of(model.config), dims_of(model.config)
    names = family.modules
    assert model.get_submodule(names.embedding) is model.get_input_embeddings()
    assert model.get_submodule(names.head) is model.get_output_embeddings()
    assert "Norm" in type(model.get_submodule(names.norm)).__name__
    assert "Rotary" in type(model.get_submodule(names.rotary)).__name__
    assert len(names.layers_of(model)) == dims.num_layers
    for layer, has_experts in zip(names.layers_of(model), dims.has_experts, strict=True):
        found = dict(layer.named_modules())
        linear = [names.query, names.key, names.value, names.output]
        assert all(isinstance(found[name], torch.nn.Linear) for name in linear)
        assert {found[name].bias is not None for name in linear[:3]} == {family.has_qkv_biases}
        assert all("Norm" in type(found[name]).__name__ for name in (names.input_norm, names.mlp_norm))
        assert {name in found for name in (names.query_norm, names.key_norm)} == {family.has_qk_norms}
        assert found[names.output].in_features == found[names.query].out_features
        assert {names.attention, names.mlp} <= found.keys()
        assert (names.experts_of(layer) is not None) == (names.router in found) == has_experts
        if not has_experts:
            gate, up, down = (found[f"{names.mlp}.{name}"] for name in (names.gate, names.up, names.down))
            assert gate.weight.shape == up.weight.shape == down.weight.T.shape
