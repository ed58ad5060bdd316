"""A model's sizes, against the weights of transformers' own model of each family."""

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from rlcore_torchkit.architectures.dims import ESSENTIAL, DeltaDims, IndexerDims, LatentDims, ModelDims, expert_layers
from rlcore_torchkit.huggingface.models import architecture_of, dims_of

MODEL = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 96, "vocab_size": 128}


def test_sizes_are_those_of_the_weights(architecture: str, plain_model: Callable[[str], Any]) -> None:
    model = plain_model(architecture)
    dims, modules = dims_of(model.config), architecture_of(model.config).modules
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    layers = modules.layers_of(model)
    assert shapes[f"{modules.embedding}.weight"] == (dims.vocab_size, dims.hidden_size)
    assert (f"{modules.head}.weight" not in shapes) == dims.tied
    assert dims.num_layers == len(layers) == dims.num_moe_layers + dims.num_dense_layers
    for layer, has_experts in zip(layers, dims.has_experts, strict=True):
        found = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
        assert found[f"{modules.query}.weight"] == (dims.num_heads * dims.head_dim, dims.hidden_size)
        assert found[f"{modules.key}.weight"] == (dims.num_kv_heads * dims.head_dim, dims.hidden_size)
        if has_experts:
            assert found[f"{modules.router}.weight"] == (dims.num_experts, dims.hidden_size)
            assert found[f"{modules.experts}.down_proj"] == (dims.num_experts, dims.hidden_size, dims.moe_intermediate_size)
        else:
            assert found[f"{modules.mlp}.{modules.up}.weight"] == (dims.intermediate_size, dims.hidden_size)


def test_which_layers_have_experts() -> None:
    model = MODEL | {"num_experts": 8, "mlp_only_layers": [3], "decoder_sparse_step": 2}
    assert expert_layers(model) == [False, True, False, False, False, True, False, True]
    assert not any(expert_layers(MODEL))
    dims = ModelDims.of(model)
    assert dims is not None
    assert (dims.num_moe_layers, dims.num_dense_layers) == (3, 5)


def test_heads_that_are_not_said_are_as_many_as_queries_and_share_the_width() -> None:
    dims = ModelDims.of(MODEL)
    assert dims is not None
    assert (dims.num_kv_heads, dims.head_dim, dims.tied, dims.num_experts) == (8, 8, False, 0)


@pytest.mark.parametrize("key", ESSENTIAL)
def test_a_config_json_that_lacks_sizes_has_no_shape(key: str) -> None:
    assert ModelDims.of({name: size for name, size in MODEL.items() if name != key}) is None
    assert ModelDims.of(MODEL | {key: None}) is None


def test_sizes_of_multi_latent_attention_are_those_of_its_keys() -> None:
    latent = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    dims, without_rank = ModelDims.of(MODEL | latent | {"q_lora_rank": 12}), ModelDims.of(MODEL | latent)
    assert dims is not None
    assert without_rank is not None
    assert dims.latent == LatentDims(query_rank=12, key_rank=16, plain_width=8, rotary_width=4, value_width=6)
    assert dims.latent.key_width == 12
    assert without_rank.latent == evolve(dims.latent, query_rank=None)


def test_ends_are_left_out_with_what_their_layers_have() -> None:
    dims = ModelDims.of({**MODEL, "num_hidden_layers": 4, "num_experts": 2, "mlp_only_layers": [0]})
    assert dims is not None
    assert dims.has_experts == (False, True, True, True)
    inner = dims.without_ends(1, 2)
    assert (inner.num_layers, inner.num_moe_layers, inner.num_dense_layers) == (1, 1, 0)
    assert dims.without_ends(0, 0) == dims
    assert dims.without_ends(0, 3).has_experts == (False,)
    assert dims.without_ends(3, 3).num_layers == 0


DELTA = {
    "layer_types": ["linear_attention", "full_attention"] * 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}


def test_layers_with_a_gated_delta_net_are_those_of_that_kind() -> None:
    dims = ModelDims.of(MODEL | DELTA)
    assert dims is not None
    assert dims.delta == DeltaDims(num_key_heads=2, num_value_heads=4, key_width=8, value_width=6, kernel=4)
    assert dims.has_delta == (True, False) * 4
    assert dims.without_ends(1, 2).has_delta == (False, True, False, True, False)
    assert dims.delta.channels == 2 * 16 + 24
    assert dims.delta.rows == 56 + 24 + 2 * 4
    assert dims.delta.num_parameters(64) == 64 * (88 + 24) + 56 * 4
    kinds = MODEL | DELTA | {"layer_types": ["full_attention"] * 8}
    for plain in (MODEL, kinds, MODEL | DELTA | {"linear_key_head_dim": None}):
        assert getattr(ModelDims.of(plain), "delta", 0) is None


def test_indexers_are_those_of_the_layers_that_are_named() -> None:
    sizes = {"index_topk": 16, "index_n_heads": 2, "index_head_dim": 8}
    layers = [True, False] * 4
    assert IndexerDims.of(MODEL | sizes | {"indexed_layers": layers}) == IndexerDims(
        num_chosen=16, num_heads=2, width=8, layers=tuple(layers)
    )
    assert IndexerDims.of(MODEL | sizes) is None
