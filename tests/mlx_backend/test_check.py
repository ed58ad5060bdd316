"""What is refused before anything is allocated, with the same words as when the model is built."""

import pytest
from mlx_support import edited, spec_of

from rlcore.spi import CheckContext, ModelError
from rlcore_mlx.check import check
from rlcore_mlx.decoder import Decoder
from rlcore_mlx.provider import MlxTrainerConfig

LAYERS = [
    {"num_experts": 4},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}},
    {"hidden_act": "gelu"},
    {"attention_bias": True},
    {"mlp_bias": True},
]


def problems_of(directory, **options):
    context = CheckContext(model=spec_of(directory), device="cpu", world_size=1, **{"max_sequence_length": 96, **options})
    return list(check(context, MlxTrainerConfig()))


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama", "mistral"])
def test_a_dense_model_has_no_problems(architecture, model_directory):
    assert problems_of(model_directory(architecture)) == []


@pytest.mark.parametrize("changes", LAYERS, ids=lambda changes: next(iter(changes)))
def test_layers_that_are_not_computed_are_problems(changes, model_directory, tmp_path):
    directory = edited(model_directory(), tmp_path / "model", **changes)
    problem = problems_of(directory)[-1]  # weights without such biases are problems, too
    with pytest.raises(ModelError) as raised:
        Decoder.of(spec_of(directory))
    assert raised.value.problems == (problem,)


def test_sequences_beyond_the_positions_are_a_problem(model_directory):
    (problem,) = problems_of(model_directory(), max_sequence_length=513)
    assert problem.found == "max_position_embeddings = 512"


def test_a_reference_is_looked_at_too(model_directory, tmp_path):
    other = edited(model_directory(), tmp_path / "other", hidden_act="gelu")
    (problem,) = problems_of(model_directory(), reference=spec_of(other))
    assert "the reference" in problem.found
