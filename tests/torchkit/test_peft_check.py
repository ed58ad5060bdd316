"""Adapters to begin with: what makes them another's."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rlcore.spi import LoraSpec
from rlcore_torchkit.peft_check import adapter_problems

SPEC = LoraSpec(rank=2, alpha=8.0)
SHAPES = {"layers.0.q_proj.lora_A.weight": (2, 6), "layers.0.q_proj.lora_B.weight": (4, 2)}


def write(directory: Path, shapes: dict[str, tuple[int, ...]] | None = None, **changes: Any) -> str:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "base_model_name_or_path": "some/base"}
    (directory / "adapter_config.json").write_text(json.dumps(config | changes))
    tensors = {f"base_model.model.{name}": np.zeros(shape) for name, shape in (shapes or SHAPES).items()}
    save_file(tensors, directory / "adapter_model.safetensors")
    return str(directory)


def found(directory: Path) -> list[str]:
    return [problem.found for problem in adapter_problems(SPEC, str(directory), "some/base", SHAPES)]


def test_what_fits_has_no_problem(tmp_path: Path) -> None:
    write(tmp_path, bias="none", modules_to_save=None, rank_pattern={}, use_dora=False)
    assert found(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base_model_name_or_path": "another/base"}, "an adapter of another/base"),
        ({"r": 4}, "r = 4"),
        ({"lora_alpha": 16}, "lora_alpha = 16"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
        ({"use_rslora": True}, "use_rslora = True"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern = {'q_proj': 8}"),
    ],
)
def test_other_forms_and_other_bases_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    write(tmp_path, **changes)
    assert found(tmp_path) == [words]


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    other = {"layers.0.q_proj.lora_A.weight": (2, 7), "layers.0.k_proj.lora_A.weight": (2, 6)}
    write(tmp_path, other, r=4, base_model_name_or_path="another/base")
    assert found(tmp_path) == [
        "r = 4",
        "an adapter of another/base",
        "no base_model.model.layers.0.q_proj.lora_B.weight",
        "base_model.model.layers.0.k_proj.lora_A.weight",
        "base_model.model.layers.0.q_proj.lora_A.weight of shape [2, 7]",
    ]


def test_the_same_directory_under_another_name_is_no_other_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    write(tmp_path, base_model_name_or_path=str(tmp_path / "base"))
    assert adapter_problems(SPEC, str(tmp_path), "./base", SHAPES) == []


def test_files_that_are_not_there_or_damaged(tmp_path: Path) -> None:
    assert len(found(tmp_path)) == 1
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"nonsense")
    (problem,) = adapter_problems(SPEC, str(tmp_path), "some/base", SHAPES)
    assert problem.path.endswith("adapter_model.safetensors")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_no_file_is_waited_for(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    (problem,) = adapter_problems(SPEC, str(tmp_path), "some/base", SHAPES)
    assert problem.path.endswith(name)
    assert "named pipe" in problem.found
