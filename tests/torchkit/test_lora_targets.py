"""The layers with adapters are those modules of transformers' models."""

import json
from pathlib import Path

import pytest
import torch
from attrs import evolve
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rlcore.spi import CheckContext, LoraSpec, ModelSpec
from rlcore_torchkit.adapters.lora_targets import adapted_layers, adapter_shapes, linear_layers, lora_problems
from rlcore_torchkit.architectures.registry import installed_model_types
from rlcore_torchkit.huggingface.models import architecture_of, dims_of
from rlcore_torchkit.testing.models import make_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "qwen3")


@pytest.fixture
def context(directory: Path) -> CheckContext:
    return CheckContext(model=ModelSpec(path=str(directory)), device="cpu", world_size=1, max_sequence_length=64)


@pytest.mark.parametrize("architecture", installed_model_types())
def test_they_are_the_linear_layers_of_the_model(architecture: str, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(make_model(tmp_path / "model", architecture, head_dim=16))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(module.weight.shape) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    del expected["lm_head"]
    found = linear_layers(architecture_of(config), dims_of(config))
    assert found == expected
    assert list(found) == list(expected), "another order"


@pytest.mark.parametrize(
    ("targets", "number"),
    [
        (("all-linear",), 14),
        (("q_proj",), 2),
        (("self_attn.q_proj", "down_proj"), 4),
        (("model.layers.1.mlp.up_proj",), 1),
        (("layers.0.mlp.up_proj", "up_proj"), 2),
    ],
)
def test_targets_are_the_ends_of_names(targets: tuple[str, ...], number: int, directory: Path) -> None:
    config = AutoConfig.from_pretrained(directory)
    layers = adapted_layers(architecture_of(config), dims_of(config), LoraSpec(targets=targets))
    assert len(layers) == number
    shapes = adapter_shapes(layers, 5)
    assert {shape for name, shape in shapes.items() if name.endswith("self_attn.q_proj.lora_A.weight")} <= {(5, 32)}
    assert len(shapes) == 2 * number


def test_without_adapters_nothing_is_wrong(context: CheckContext) -> None:
    assert list(lora_problems(context)) == []
    assert list(lora_problems(evolve(context, lora=LoraSpec()))) == []


def test_each_target_that_matches_nothing_is_named(context: CheckContext) -> None:
    problems = list(lora_problems(evolve(context, lora=LoraSpec(targets=("q_porj", "q_proj", "proj", "lm_head")))))
    assert [problem.path for problem in problems] == ["lora.targets"] * 3
    assert "q_porj" in problems[0].found
    assert problems[0].remedy == 'Did you mean "q_proj"?'
    assert "gate_proj" in problems[0].expected


def test_a_model_that_cannot_be_read_is_left_to_others(context: CheckContext, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    other = evolve(context, model=ModelSpec(path=str(tmp_path)), lora=LoraSpec(targets=("nothing",)))
    assert list(lora_problems(other)) == []
