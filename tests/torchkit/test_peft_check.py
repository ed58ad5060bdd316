"""Adapters to begin with: what makes them another's."""

import ast
import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rlcore.spi import LoraSpec
from rlcore_torchkit.adapters.peft_check import adapter_problems

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
    ("changes", "named"),
    [
        ({"target_modules": ["v_proj"]}, ["target_modules = ['v_proj'] without layers.0.q_proj"]),
        ({"target_modules": r".*v_proj"}, ["target_modules = '.*v_proj' without layers.0.q_proj"]),
        ({"target_modules": "("}, ["target_modules = '(' "]),
        ({"target_modules": ["proj"]}, ["without layers.0.q_proj"]),
        ({"base_model_name_or_path": "a\0b"}, ["an adapter of a\0b"]),
        ({"lora_alpha": float("nan")}, ["lora_alpha = nan"]),
        *(({"target_modules": targets}, []) for targets in (None, "all-linear", r".*q_proj", ["0.q_proj", "v_proj"])),
    ],
)
def test_what_contradicts_the_tensors_or_is_no_value_is_named(
    changes: dict[str, Any], named: list[str], tmp_path: Path
) -> None:
    write(tmp_path, **changes)
    assert len(problems := found(tmp_path)) == len(named)
    assert all(part in problem for part, problem in zip(named, problems, strict=True))


@pytest.mark.parametrize("dtype", ["int8", "bool", "float16", "float64"])
def test_adapters_are_floats_without_scales(dtype: str, tmp_path: Path) -> None:
    write(tmp_path)
    tensors = {f"base_model.model.{name}": np.zeros(shape, dtype) for name, shape in SHAPES.items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    assert ["lora_A.weight in " in problem for problem in found(tmp_path)] == [True] * (not dtype.startswith("float"))


PLAIN = {
    "auto_mapping": None,
    "peft_version": "0.21.2",
    "task_type": "CAUSAL_LM",
    "inference_mode": True,
    "target_modules": ["q_proj"],
    "lora_dropout": 0.1,
    "megatron_core": "megatron.core",
    "qalora_group_size": 16,
    "runtime_config": {"ephemeral_gpu_offload": True},
    "eva_config": {"rho": 1.0},
}
"""Keys of adapter_config.json that have no effect on trained adapters."""
OTHERS = {
    "peft_type": "IA3",
    "task_type": "SEQ_CLS",
    "exclude_modules": ["v_proj"],
    "fan_in_fan_out": True,
    "bias": "lora_only",
    "use_rslora": True,
    "modules_to_save": ["lm_head"],
    "layers_to_transform": [0],
    "layers_pattern": "layers",
    "rank_pattern": {"q_proj": 8},
    "alpha_pattern": {"q_proj": 8},
    "megatron_config": {"tensor_model_parallel_size": 2},
    "trainable_token_indices": [0, 1],
    "loftq_config": {"loftq_bits": 4},
    "corda_config": {"corda_method": "ipm"},
    "lora_ga_config": {"direction": "ArB2r"},
    "use_dora": True,
    "velora_config": {"rank": 1},
    "alora_invocation_tokens": [5, 6],
    "use_qalora": True,
    "monteclora_config": {"num_samples": 2},
    "layer_replication": [[0, 2]],
    "lora_bias": True,
    "target_parameters": ["experts.down_proj"],
    "use_bdlora": {"nblocks": 2},
    "arrow_config": {"top_k": 3},
    "kasa_config": {"beta": 1e-4},
    "ensure_weight_tying": True,
    "use_a_later_form": True,
    "scale_of_a_later_form": 0.5,
    "number_of_a_later_form": 0,
}
"""A value of each key of PEFT 0.21.2's LoraConfig that makes the adapters another kind, and keys that it does not know."""
CHECKED = {"r", "lora_alpha", "base_model_name_or_path", "revision", "init_lora_weights"}


@pytest.mark.parametrize(("key", "value"), OTHERS.items())
def test_a_key_of_another_form_is_refused_by_its_name(key: str, value: Any, tmp_path: Path) -> None:
    write(tmp_path, **(PLAIN | {key: value}))
    assert found(tmp_path) == [f"{key} = {value!r}"]


@pytest.mark.parametrize("off", [None, False, [], {}])
def test_a_key_that_is_off_is_no_other_form(off: Any, tmp_path: Path) -> None:
    is_text = {"peft_type": "LORA", "bias": "none", "task_type": None}
    write(tmp_path, **(PLAIN | dict.fromkeys(OTHERS, off) | is_text))
    assert found(tmp_path) == []


@pytest.mark.parametrize(
    ("value", "is_plain"),
    [
        *((value, True) for value in (True, False, None, "gaussian", "Gaussian", "orthogonal", "eva")),
        *((value, False) for value in ("pissa", "pissa_niter_4", "olora", "OLoRA", "corda", "loftq", "lora_ga", "mica", "new")),
    ],
)
def test_first_values_that_changed_the_base_model_are_refused(value: Any, is_plain: bool, tmp_path: Path) -> None:
    write(tmp_path, init_lora_weights=value)
    assert found(tmp_path) == ([] if is_plain else [f"init_lora_weights = {value!r}"])


def test_every_key_of_the_installed_peft_is_decided() -> None:
    """Its sources are read, since importing it takes seconds."""
    package = find_spec("peft")
    if package is None or package.origin is None:
        pytest.skip("peft is not installed")
    keys = set()
    for file, name in (("config.py", "PeftConfigMixin"), ("config.py", "PeftConfig"), ("tuners/lora/config.py", "LoraConfig")):
        tree = ast.parse((Path(package.origin).parent / file).read_text())
        (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        keys |= {node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    assert len(keys) > 20
    assert keys <= PLAIN.keys() | OTHERS.keys() | CHECKED


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base_model_name_or_path": "another/base"}, "an adapter of another/base"),
        ({"revision": "v2"}, "revision = v2"),
        ({"r": 4}, "r = 4"),
        ({"lora_alpha": 16}, "lora_alpha = 16"),
    ],
)
def test_other_bases_and_other_numbers_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    write(tmp_path, **changes)
    assert [problem.found for problem in adapter_problems(SPEC, str(tmp_path), "some/base", SHAPES, revision="main")] == [words]


def test_rank_and_alpha_that_are_left_out_are_pefts(tmp_path: Path) -> None:
    write(tmp_path)
    config = {"peft_type": "LORA", "revision": "main"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert found(tmp_path) == ["r = 8"]


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
