"""What a model's files may hold: shards, fused experts, what is missing or of a wrong shape."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from megatron_weights_cases import MODELS, assert_equal, in_files, opened
from safetensors.torch import save_file
from torch import Tensor

from rlcore.spi import ModelError
from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_torchkit.testing.models import make_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weight-files")
    for name, (architecture, tied) in MODELS.items():
        make_model(root / name, architecture, tied=tied, hidden_size=16)
    return root


@pytest.fixture
def rewritten(models: Path, tmp_path: Path) -> Callable[..., Path]:
    """A function (model, tensors) -> a copy of the model's directory with these tensors in their one file."""

    def write(name: str, tensors: Mapping[str, Tensor]) -> Path:
        shutil.copytree(models / name, tmp_path / name)
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, tmp_path / name / "model.safetensors")
        return tmp_path / name

    return write


def loaded(directory: Path) -> dict[str, Tensor]:
    with opened(directory, ParallelLayout()) as model:
        model.load()
        return model.exported()


def test_sharded_files(models: Path, tmp_path: Path) -> None:
    directory = tmp_path / "sharded"
    shutil.copytree(models / "qwen3", directory)
    tensors = in_files(directory)
    (directory / "model.safetensors").unlink()
    places = {name: f"model-{number % 3 + 1:05}-of-00003.safetensors" for number, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in places if places[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert_equal(loaded(directory), tensors)


def test_experts_in_one_tensor(models: Path, rewritten: Callable[..., Path]) -> None:
    """As transformers holds them in memory."""
    expected = in_files(models / "qwen3_moe")
    fused = {name: tensor for name, tensor in expected.items() if ".experts." not in name}
    for layer in range(2):
        where = f"model.layers.{layer}.mlp.experts"
        gates, ups, downs = (
            torch.stack([expected[f"{where}.{expert}.{name}_proj.weight"] for expert in range(4)])
            for name in ("gate", "up", "down")
        )
        fused |= {f"{where}.gate_up_proj": torch.cat([gates, ups], 1), f"{where}.down_proj": downs}
    directory = rewritten("qwen3_moe", fused)
    assert_equal(loaded(directory), expected)
    fused["model.layers.1.mlp.experts.down_proj"] = fused["model.layers.1.mlp.experts.down_proj"][:3]
    save_file(fused, directory / "model.safetensors")
    with pytest.raises(ModelError) as raised:
        loaded(directory)
    (problem,) = raised.value.problems
    assert (problem.path, problem.found) == (str(directory), "model.layers.1.mlp.experts.down_proj of shape [3, 16, 16]")
    assert problem.expected.startswith("expert 3 in it")


def test_all_that_is_wrong_is_reported_at_once(models: Path, rewritten: Callable[..., Path]) -> None:
    tensors = in_files(models / "llama")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    tensors["model.norm.weight"] = torch.ones(17)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(48, 15)
    with pytest.raises(ModelError) as raised:
        loaded(rewritten("llama", tensors))
    assert {problem.found: problem.expected for problem in raised.value.problems} == {
        "no model.layers.1.self_attn.k_proj.weight in the weights": "a tensor of shape [8, 16]",
        "model.norm.weight of shape [17]": "[16], as config.json says",
        "model.layers.0.mlp.up_proj.weight of shape [48, 15]": "[48, 16], as config.json says",
    }


def test_a_file_that_is_no_safetensors_file(rewritten: Callable[..., Path]) -> None:
    directory = rewritten("qwen2", {"model.norm.weight": torch.ones(16)})
    (directory / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(ModelError) as raised:
        loaded(directory)
    assert {problem.path for problem in raised.value.problems} == {str(directory / "model.safetensors")}
