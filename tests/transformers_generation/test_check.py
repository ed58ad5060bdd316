"""What the generator finds wrong with a model, before anything is allocated and again once it is loaded."""

import json
import shutil

import pytest

from rlcore.spi import CheckContext, LoraSpec, ModelError, ModelSpec
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


def test_a_model_that_no_class_computes_is_a_problem(tools, qwen3, tmp_path):
    directory = edited(qwen3, tmp_path / "model", architectures=["OtherForCausalLM"], model_type="other")
    (problem,) = problems_of(directory)
    assert (problem.path, problem.found) == (str(directory / "config.json"), "model_type other")
    with pytest.raises(ModelError) as raised:
        tools.make_backend(directory, fill=False)
    assert raised.value.problems == (problem,)


def made(tmp_path, model_type, **options):
    """A directory with the config.json of a model that no family describes, and no weights."""
    tmp_path.mkdir(exist_ok=True)
    classes = {"phi": "PhiForCausalLM", "qwen3_next": "Qwen3NextForCausalLM", "qwen2_vl": "Qwen2VLForConditionalGeneration"}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": model_type, "architectures": [classes[model_type]], "max_position_embeddings": 128} | options)
    )
    return tmp_path


def test_what_a_class_cannot_do_is_said_at_once(tmp_path):
    lora = LoraSpec(rank=4)
    context = CheckContext(
        model=ModelSpec(path=str(made(tmp_path / "phi", "phi"))),
        device="cpu",
        world_size=1,
        max_sequence_length=129,
        generator_lora=lora,
        replays_routing=True,
    )
    paths = [problem.path for problem in check(context, TransformersConfig())]
    assert paths == [str(tmp_path / "phi" / "config.json"), "refit.adapters", "rollout.replay_routing"]
    assert list(problems_of(made(tmp_path / "phi", "phi"))) == []


def test_images_are_problems_and_states_are_none(tmp_path):
    assert list(problems_of(made(tmp_path / "next", "qwen3_next", layer_types=["linear_attention", "full_attention"]))) == []
    (problem,) = problems_of(made(tmp_path / "images", "qwen2_vl", vision_config={"depth": 1}))
    assert "reads images" in problem.found


def test_a_routing_is_reported_by_models_that_route(tools):
    assert model_problems({"num_experts": 4}, "model", 8, routed_experts=True) == []
    assert [problem.path for problem in model_problems({}, "model", 8, routed_experts=True)] == ["rollout.replay_routing"]
    assert model_problems({}, "model", 8) == []
