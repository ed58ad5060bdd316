"""Layers are divided over the parts of a pipeline as the recipe says, or as evenly as can be."""

from hypothesis import given
from hypothesis import strategies as st

from rlcore_megatron.layouts.stages import layer_numbers_of_stages, layers_of_parts, layers_of_stages
from rlcore_megatron.setup.config import MegatronConfig


@given(stages=st.integers(1, 8), virtual=st.integers(1, 4), extra=st.integers(0, 60))
def test_every_layer_has_its_part_and_the_ends_have_fewest(stages: int, virtual: int, extra: int) -> None:
    num_layers = stages * virtual + extra
    config = MegatronConfig(pipeline_parallel=stages, virtual_pipeline_parallel=virtual)
    parts = layers_of_parts(config, num_layers)
    assert (len(parts), sum(parts)) == (stages * virtual, num_layers)
    assert max(parts) - min(parts) <= 1
    assert parts[-1] == min(parts)
    assert parts[0] == min(parts) or min(parts[1:-1], default=max(parts)) == max(parts)
    of_stages = layers_of_stages(config, num_layers)
    assert (len(of_stages), sum(of_stages)) == (stages, num_layers)
    numbers = layer_numbers_of_stages(config, num_layers)
    assert tuple(map(len, numbers)) == of_stages
    assert sorted(layer for stage in numbers for layer in stage) == list(range(num_layers))
    assert 0 in numbers[0]
    assert num_layers - 1 in numbers[-1]


def test_models_of_any_depth() -> None:
    """Llama 3.1 405B has 126 layers, Qwen3-235B-A22B 94."""
    assert layers_of_parts(MegatronConfig(pipeline_parallel=4), 126) == (31, 32, 32, 31)
    assert layers_of_parts(MegatronConfig(pipeline_parallel=8), 94) == (11, 12, 12, 12, 12, 12, 12, 11)
    interleaved = MegatronConfig(pipeline_parallel=2, virtual_pipeline_parallel=2)
    assert (layers_of_parts(interleaved, 5), layers_of_stages(interleaved, 5)) == ((1, 2, 1, 1), (2, 3))
    assert layer_numbers_of_stages(interleaved, 5) == ((0, 3), (1, 2, 4))


def test_a_list_is_of_the_policys_layers() -> None:
    config = MegatronConfig(pipeline_parallel=2, pipeline_layers=(1, 3))
    assert layers_of_parts(config, 4) == (1, 3)
    assert layers_of_parts(config, 6) == (3, 3)
