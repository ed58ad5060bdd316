"""What the generator finds wrong with a model, before anything is allocated and again once it is loaded."""

import json
import shutil

import pytest

from rlcore.spi import CheckContext, ModelError, ModelSpec
from rlcore_transformers.check import check, model_problems
from rlcore_transformers.config import TransformersConfig


def edited(directory, target, **changes):
    """A copy of a model directory with another config.json."""
    shutil.copytree(directory, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return target


def problems_of(directory, max_sequence_length=96, **options):
    context = CheckContext(
        model=ModelSpec(path=str(directory)), device="cpu", world_size=1, max_sequence_length=max_sequence_length
    )
    return check(context, TransformersConfig(**options))


def test_a_model_that_fits_has_no_problems(any_checkpoint):
    assert list(problems_of(any_checkpoint, max_sequence_length=512)) == []


def test_sequences_beyond_the_models_positions_are_a_problem(tools, qwen3):
    (problem,) = problems_of(qwen3, max_sequence_length=513)
    assert (problem.path, problem.found) == (str(qwen3 / "config.json"), "max_position_embeddings = 512")
    with pytest.raises(ModelError) as raised:
        tools.make_backend(qwen3, max_length=513)
    assert raised.value.problems == (problem,)


def test_positions_that_depend_on_the_length_are_a_problem(tools, qwen3, tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0}
    directory = edited(qwen3, tmp_path / "model", rope_parameters=rope)
    (problem,) = problems_of(directory)
    assert "longrope" in str(problem)


def test_an_unsupported_architecture_is_a_problem(tools, qwen3, tmp_path):
    directory = edited(qwen3, tmp_path / "model", architectures=["GPT2LMHeadModel"], model_type="gpt2")
    (problem,) = problems_of(directory)
    assert (problem.path, problem.found) == (str(directory / "config.json"), "model_type gpt2")
    with pytest.raises(ModelError) as raised:
        tools.make_backend(directory, fill=False)
    assert raised.value.problems == (problem,)


def test_a_routing_is_reported_by_models_that_route(tools):
    assert model_problems({"num_experts": 4}, "model", 8, routed_experts=True) == []
    assert [problem.path for problem in model_problems({}, "model", 8, routed_experts=True)] == ["rollout.replay_routing"]
    assert model_problems({}, "model", 8) == []
