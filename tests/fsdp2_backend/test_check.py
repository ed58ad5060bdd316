"""Provider and options."""

import json
import shutil
from pathlib import Path

import pytest
from attrs import evolve
from safetensors.torch import load_file, save_file

from rlcore.spi import CheckContext, LoraSpec, ModelSpec, Note, OptimizerGroup, OptimizerSpec
from rlcore_fsdp2.check import check
from rlcore_fsdp2.config import Fsdp2Config
from rlcore_torchkit.testing.image_models import make_image_model


@pytest.fixture
def context(model_directory):
    model = ModelSpec(path=str(model_directory()))
    return CheckContext(model=model, device="cpu", world_size=1, max_sequence_length=512)


def test_defaults_have_no_problem(context):
    assert list(check(context, Fsdp2Config())) == []


def test_compiling_needs_a_compiler(context, monkeypatch):
    config = Fsdp2Config(compile_layers=True)
    monkeypatch.setattr(shutil, "which", {"clang++": "/usr/bin/clang++"}.get)
    assert list(check(context, config)) == []
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert [problem.path for problem in check(context, config)] == ["trainer.fsdp2.compile_layers"]
    assert list(check(context, Fsdp2Config())) == []


def test_groups_name_tensors_of_the_files(context):
    groups = (OptimizerGroup(parameters=("*.q_proj.weight",), learning_rate=0.1), OptimizerGroup(parameters=("score.*",)))
    found = check(evolve(context, optimizer=OptimizerSpec(groups=groups)), Fsdp2Config())
    assert [problem.path for problem in found] == ["optimizer.groups[1].parameters"]
    sound = evolve(context, optimizer=OptimizerSpec(groups=groups), head="value")
    assert list(check(sound, Fsdp2Config())) == []
    alone = evolve(context, optimizer=OptimizerSpec(groups=groups), needs_policy=False, needs_reference=True)
    assert list(check(alone, Fsdp2Config())) == []


def problems_of_groups(context, config, *patterns):
    groups = tuple(OptimizerGroup(parameters=(pattern,), learning_rate=0.1) for pattern in patterns)
    return [problem.path for problem in check(evolve(context, optimizer=OptimizerSpec(groups=groups)), config)]


def test_names_of_groups_are_those_of_exports(context, model_directory, tmp_path):
    """A directory that lacks the prefix of a decoder's names has them in exports, as the build has them."""
    shutil.copytree(model_directory(), tmp_path / "bare")
    file = tmp_path / "bare" / "model.safetensors"
    save_file({name.removeprefix("model."): value for name, value in load_file(file).items()}, file, {"format": "pt"})
    bare = evolve(context, model=ModelSpec(path=str(tmp_path / "bare")))
    assert problems_of_groups(bare, Fsdp2Config(), "model.embed_tokens.weight") == []
    assert problems_of_groups(bare, Fsdp2Config(), "embed_tokens.weight") == ["optimizer.groups[0].parameters"]


def test_critic_of_a_language_model_has_no_tensor_of_its_head(context):
    critic = evolve(context, head="value", critic=context.model)
    assert problems_of_groups(critic, Fsdp2Config(), "score.weight") == []
    assert problems_of_groups(critic, Fsdp2Config(), "lm_head.weight") == ["critic.groups[0].parameters"]


def test_frozen_tower_has_no_tensor_that_trains(context, tmp_path):
    make_image_model(tmp_path / "images")
    images = evolve(context, model=ModelSpec(path=str(tmp_path / "images")))
    assert problems_of_groups(images, Fsdp2Config(), "*visual.*") == []
    assert problems_of_groups(images, Fsdp2Config(freeze="vision"), "*visual.*") == ["optimizer.groups[0].parameters"]


def test_parts_of_what_a_parameter_holds_are_refused(context, model_directory):
    experts = evolve(context, model=ModelSpec(path=str(model_directory("qwen3_moe", False))))
    assert problems_of_groups(experts, Fsdp2Config(), "*.layers.0.mlp.experts.2.*") == ["optimizer.groups"] * 2


def test_moments_in_8_bits_need_torchao(context, monkeypatch):
    eight_bit = evolve(context, optimizer=OptimizerSpec(moments="8bit"))
    assert list(check(eight_bit, Fsdp2Config())) == []
    monkeypatch.setattr("rlcore_torchkit.optimizer.settings.find_spec", lambda name: None)
    (problem,) = check(eight_bit, Fsdp2Config())
    assert problem.path == "optimizer.moments"
    assert "rlcore-fsdp2[8bit]" in problem.remedy


def test_adapters_are_not_beside_layers_of_float8(context, monkeypatch):
    monkeypatch.setattr("rlcore_fsdp2.layout_check.find_spec", lambda name: object())
    adapted = evolve(context, lora=LoraSpec())
    assert list(check(adapted, Fsdp2Config())) == []
    paths = [problem.path for problem in check(adapted, Fsdp2Config(fp8=True)) if "[lora]" in problem.found]
    assert paths == ["trainer.fsdp2.fp8"]


def test_float8_in_a_narrow_model_is_noted(context, monkeypatch, tmp_path):
    monkeypatch.setattr("rlcore_fsdp2.layout_check.find_spec", lambda name: object())
    on_gpu = evolve(context, device="cuda")
    (note,) = check(on_gpu, Fsdp2Config(fp8=True))
    assert isinstance(note, Note)
    assert note.path == "trainer.fsdp2.fp8"
    assert list(check(on_gpu, Fsdp2Config())) == list(check(context, Fsdp2Config(fp8=True))) == []
    refused = check(evolve(on_gpu, max_sequence_length=513), Fsdp2Config(fp8=True))
    assert not any(isinstance(one, Note) for one in refused)


def test_model_problems(context, model_directory, tmp_path):
    long = [str(problem) for problem in check(evolve(context, max_sequence_length=513), Fsdp2Config())]
    assert len(long) == 1
    assert "max_position_embeddings = 512; expected at least 513" in long[0]
    half = evolve(context, model=ModelSpec(path=context.model.path, dtype="float16"))
    assert [problem.path for problem in check(half, Fsdp2Config())] == ["model.dtype"]
    shutil.copytree(context.model.path, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({"architectures": ["GPT9LMHeadModel"], "model_type": "gpt9"}))
    broken = evolve(context, model=ModelSpec(path=str(tmp_path / "model")))
    problems = [(problem.path, problem.found) for problem in check(broken, Fsdp2Config())]
    assert (str(file), "model_type gpt9") in problems


def test_what_a_model_of_images_cannot_have(context, tmp_path):
    images = evolve(context, model=ModelSpec(path=str(make_image_model(tmp_path / "images"))))
    assert list(check(images, Fsdp2Config(freeze="vision", activation_checkpointing=True))) == []
    (divided,) = check(evolve(images, world_size=2), Fsdp2Config(tensor_parallel=2))
    assert divided.path == "trainer.fsdp2.tensor_parallel"
    assert list(check(evolve(images, world_size=2), Fsdp2Config(context_parallel=2))) == []
    (uneven,) = check(evolve(images, world_size=3), Fsdp2Config(context_parallel=3))
    assert (uneven.path, uneven.expected) == ("trainer.fsdp2.context_parallel", "a divisor of 2")
    frozen = evolve(images, reference=images.model, world_size=3)
    assert "trainer.fsdp2.context_parallel" in [found.path for found in check(frozen, Fsdp2Config(context_parallel=3))]
    assert "lora" in [problem.path for problem in check(evolve(images, lora=LoraSpec()), Fsdp2Config())]
    (frozen,) = check(context, Fsdp2Config(freeze="vision"))
    assert frozen.path == "trainer.fsdp2.freeze"


def configured(context, tmp_path, **content):
    file = Path(shutil.copytree(context.model.path, tmp_path / "model")) / "config.json"
    (file.parent / "model.safetensors").unlink()
    file.write_text(json.dumps(content))
    return evolve(context, model=ModelSpec(path=str(file.parent)))


def test_a_model_that_no_family_describes_has_no_layout_and_no_replay(context, tmp_path):
    gemma = configured(context, tmp_path, architectures=["Gemma3ForCausalLM"], model_type="gemma3_text")
    assert list(check(gemma, Fsdp2Config(activation_checkpointing=True, reduce_every_microbatch=True))) == []
    options = {"context_parallel": 2, "expert_parallel": 2, "fp8": True, "compile_layers": True}
    found = {problem.path for problem in check(evolve(gemma, world_size=4), Fsdp2Config(**options)) if "gemma" in problem.found}
    assert found == {f"trainer.fsdp2.{option}" for option in options}
    assert list(check(evolve(gemma, world_size=2), Fsdp2Config(tensor_parallel=2))) == []
    gpt2 = configured(context, tmp_path / "other", architectures=["GPT2LMHeadModel"], model_type="gpt2")
    (problem,) = check(evolve(gpt2, world_size=2), Fsdp2Config(tensor_parallel=2))
    assert problem.path == "trainer.fsdp2.tensor_parallel"
    assert "base_model_tp_plan" in problem.remedy
    replayed = check(evolve(gemma, replays_routing=True), Fsdp2Config())
    assert [(problem.path, problem.expected) for problem in replayed] == [("rollout.replay_routing", "false")]


@pytest.mark.parametrize(("length", "refused"), [(64, False), (65, True)])
def test_angles_that_change_with_the_longest_sequence_are_refused(length, refused, context, tmp_path):
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    phi = configured(
        context,
        tmp_path,
        architectures=["Phi3ForCausalLM"],
        model_type="phi3",
        rope_parameters=rope,
        max_position_embeddings=512,
    )
    found = [
        problem for problem in check(evolve(phi, max_sequence_length=length), Fsdp2Config()) if "longrope" in problem.found
    ]
    assert len(found) == refused


def test_a_reference_that_no_family_describes_neither_compiles_nor_has_other_angles(context, tmp_path):
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    phi = configured(context, tmp_path, architectures=["Phi3ForCausalLM"], model_type="phi3", rope_parameters=rope)
    compared = evolve(context, reference=phi.model, needs_reference=True, max_sequence_length=64, world_size=2)
    assert list(check(compared, Fsdp2Config(tensor_parallel=2))) == []
    longer = evolve(compared, max_sequence_length=65)
    found = [
        problem.found
        for problem in check(longer, Fsdp2Config(compile_layers=True))
        if problem.found != "true, but no C++ compiler"
    ]
    assert [("phi3" in one, "longrope" in one) for one in found] == [(True, False), (False, True)]
