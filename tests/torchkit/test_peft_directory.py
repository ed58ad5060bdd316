"""A PEFT directory, written and read."""

import json
from pathlib import Path

import pytest
import torch

from rlcore.spi import LoraSpec, ModelError, ModelSpec, StorageError
from rlcore_torchkit.adapters.peft_directory import adapter_config, read_adapters, write_adapters

MODEL = ModelSpec(path="some/base", revision="main")
ADAPTERS = {
    "model.layers.0.self_attn.q_proj.lora_A.weight": torch.arange(12.0).view(2, 6),
    "model.layers.0.self_attn.q_proj.lora_B.weight": torch.arange(8.0).view(2, 4).T,
    "model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(2, 6),
    "model.layers.0.mlp.up_proj.lora_B.weight": torch.ones(5, 2),
}
SHAPES = {name: tuple(tensor.shape) for name, tensor in ADAPTERS.items()}


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    spec = LoraSpec(rank=2, alpha=3.5, targets=("q_proj", "up_proj"))
    assert set(write_adapters(tmp_path, ADAPTERS, spec, MODEL)) == {path.name for path in tmp_path.iterdir()}
    found = read_adapters(str(tmp_path), SHAPES, spec, "some/base")
    assert found.keys() == ADAPTERS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in ADAPTERS.items())
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 3.5, ["q_proj", "up_proj"])
    assert (config["base_model_name_or_path"], config["revision"]) == ("some/base", "main")


def test_all_linear_is_written_as_names() -> None:
    """By which it is the same whatever counts as linear where it is read."""
    config = adapter_config(LoraSpec(rank=2), MODEL, ADAPTERS)
    assert config["target_modules"] == ["q_proj", "up_proj"]
    assert config["lora_alpha"] == 32
    assert isinstance(config["lora_alpha"], int)


def test_another_models_adapters_are_refused(tmp_path: Path) -> None:
    write_adapters(tmp_path, ADAPTERS, LoraSpec(rank=2), MODEL)
    with pytest.raises(ModelError, match="an adapter of some/base"):
        read_adapters(str(tmp_path), SHAPES, LoraSpec(rank=2), "another/base")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adapters_of_a_file_are_of_the_trainers_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    thirds = {name: torch.full_like(tensor, 1 / 3, dtype=torch.float64) for name, tensor in ADAPTERS.items()}
    write_adapters(tmp_path, thirds, LoraSpec(rank=2), MODEL)
    found = read_adapters(str(tmp_path), SHAPES, LoraSpec(rank=2), MODEL.path, dtype)
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    assert all(torch.equal(tensor, thirds[name].to(dtype)) for name, tensor in found.items())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_adapters_are_finite_in_float32(value: float, tmp_path: Path) -> None:
    wrong = {name: torch.full_like(tensor, value, dtype=torch.float64) for name, tensor in ADAPTERS.items()}
    write_adapters(tmp_path, wrong, LoraSpec(rank=2), MODEL)
    with pytest.raises(ModelError, match="NaN or infinite numbers in "):
        read_adapters(str(tmp_path), SHAPES, LoraSpec(rank=2), MODEL.path)


def test_a_full_disk_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        write_adapters(tmp_path / "nowhere", ADAPTERS, LoraSpec(rank=2), MODEL)
