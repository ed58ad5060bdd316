"""A single fault in a config.json is found before a run, with the file and the key."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rlcore.spi import ModelSpec
from rlcore.spi.weights import Head
from rlcore_model_files.directory import stored_shapes
from rlcore_torchkit.huggingface import class_trial
from rlcore_torchkit.huggingface.class_trial import class_problems
from rlcore_torchkit.testing.models import make_model


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that no family describes."""
    return make_model(tmp_path_factory.mktemp("gemma") / "model", "gemma3_text")


def problems(directory: Path, source: Path, changes: Mapping[str, Any], head: Head = "tokens") -> list[str]:
    """Problems of the source with changes to its config.json, in which "-" takes a key out."""
    shutil.copytree(source, directory, dirs_exist_ok=True)
    content = json.loads((source / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps({key: value for key, value in content.items() if value != "-"}))
    return [str(problem) for problem in class_problems(ModelSpec(path=str(directory)), head)]


OF_VALUES = [
    ({"hidden_size": None}, "hidden_size = null"),
    ({"vocab_size": None}, "vocab_size = null"),
    ({"use_cache": "yes"}, 'use_cache = "yes"'),
    ({"initializer_range": 3}, "initializer_range = 3"),
    ({"hidden_act": "nope"}, 'hidden_act = "nope"'),
    ({"dtype": "nope"}, 'dtype = "nope"'),
    ({"rope_parameters": {"rope_type": "nope", "rope_theta": 1e4}}, 'rope_parameters = {"rope_type": "nope"'),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters ="),
    ({"quantization_config": {}}, "quantization_config = {}"),
    ({"layer_types": ["full_attention"]}, 'layer_types = ["full_attention"]'),
]
OF_WEIGHTS = [
    ({"hidden_size": "-"}, "hidden_size = 4096, which it lacks"),
    ({"intermediate_size": 95}, "intermediate_size = 95"),
    ({"num_key_value_heads": 1}, "num_key_value_heads = 1"),
    ({"num_attention_heads": "-"}, "num_attention_heads = 32, which it lacks"),
    ({"num_hidden_layers": "-", "layer_types": "-"}, "num_hidden_layers = 32, which it lacks"),
    ({"attention_bias": True}, "attention_bias = true"),
]


@pytest.mark.parametrize(("changes", "named"), [*OF_VALUES, *OF_WEIGHTS])
def test_a_fault_is_named_by_file_and_key(
    changes: dict[str, Any], named: str, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    found = problems(tmp_path, model_directory("qwen3"), changes)
    assert found
    for problem in found:
        assert named in problem
        assert f"{tmp_path}/config.json: " in problem or (problem.startswith(f"{tmp_path}: ") and " in config.json" in problem)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_activation": "nope"}, 'hidden_activation = "nope"'),
        ({"sliding_window": 0}, "sliding_window = 0; expected a positive number"),
        ({"attention_bias": True}, "attention_bias = true"),
        ({"head_dim": 16}, "head_dim = 16"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = false"),
    ],
)
def test_so_is_one_of_a_model_that_no_family_describes(
    changes: dict[str, Any], named: str, gemma: Path, tmp_path: Path
) -> None:
    found = problems(tmp_path, gemma, changes)
    assert found
    assert all(named in problem for problem in found)


@pytest.mark.parametrize(("number", "other"), [("1", "9"), ("3", "7"), ("0", "00")])
def test_numbers_of_experts_have_no_gaps(
    number: str, other: str, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(model_directory("qwen3_moe"), source)
    tensors = load_file(source / "model.safetensors")
    renamed = {name.replace(f".experts.{number}.", f".experts.{other}."): tensor for name, tensor in tensors.items()}
    save_file(renamed, source / "model.safetensors")
    missing, surplus = problems(tmp_path / "model", source, {})
    assert f"no model.layers.0.mlp.experts.{number}." in missing
    assert f"model.layers.0.mlp.experts.{other}." in surplus


@pytest.mark.parametrize(
    "changes",
    [
        *({"num_nextn_predict_layers": value} for value in ("1", None, 0)),
        *({key: "flash_attention_2"} for key in ("attn_implementation", "_attn_implementation")),
    ],
)
def test_keys_that_no_reader_takes_from_the_file_are_no_faults(
    changes: Mapping[str, Any], model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    """Layers ahead that are no number are none, and whoever loads a model chooses its attention."""
    assert problems(tmp_path, model_directory("qwen3"), changes) == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_experts_per_tok": 5}, "num_experts_per_tok = 5; expected 1 to 4"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok = 0; expected 1 to 4"),
        ({"num_experts": 2}, "num_experts = 2, and num_local_experts = 4; expected one value"),
        ({"rope_theta": 5e5}, "rope_theta = 500000.0, and rope_parameters.rope_theta = 10000.0"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            'rope_scaling.rope_type = "linear", and rope_parameters.rope_type = "default"',
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, "partial_rotary_factor": 0.5},
            "partial_rotary_factor = 0.5; expected 1",
        ),
        ({"partial_rotary_factor": 0.5}, None),
        ({"rope_scaling": {"type": "default"}, "rope_theta": 1e4, "num_experts": 4}, None),
        ({"rope_scaling": None, "rope_theta": None}, None),
    ],
)
def test_values_that_contradict_each_other_are_named(
    changes: dict[str, Any], named: str | None, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    found = problems(tmp_path, model_directory("qwen3_moe"), rope | changes)
    assert named in found[0] if named else not found


@pytest.mark.parametrize("changes", [{}, {"rms_norm_eps": "-"}, {"unknown": None}, {"auto_map": {}}, {"model_type": "acme"}])
def test_what_trains_has_no_problem(
    changes: dict[str, Any], model_directory: Callable[[str], Path], gemma: Path, tmp_path: Path
) -> None:
    for number, source in enumerate((model_directory("qwen3"), gemma)):
        assert problems(tmp_path / str(number), source, changes) == []
    assert problems(tmp_path / "2", model_directory("qwen3"), changes, "value") == []


def test_infinite_numbers_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    from transformers import FalconH1Config

    FalconH1Config(num_hidden_layers=1, vocab_size=64, time_step_limit=(0.0, float("inf"))).save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert class_problems(ModelSpec(path=str(tmp_path))) == []


def test_code_that_comes_with_a_model_is_judged_by_no_other_class(
    model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    changes = {"auto_map": {"AutoModelForCausalLM": "own.Own"}, "intermediate_size": 95}
    assert problems(tmp_path, model_directory("qwen3"), changes)
    assert class_problems(ModelSpec(path=str(tmp_path), trust_remote_code=True)) == []


def test_a_class_that_takes_too_long_is_named(
    model_directory: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLCORE_LOAD_TIMEOUT_S", "1")
    (problem,) = problems(tmp_path, model_directory("qwen3_moe"), {"num_local_experts": 10**8})
    assert problem.startswith(f"{tmp_path}/config.json: ")
    assert "took longer than 1 s" in problem


def test_files_are_looked_at_again_only_when_they_change(
    model_directory: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(model_directory("qwen3"), tmp_path, dirs_exist_ok=True)
    looked: list[Path] = []
    monkeypatch.setattr(class_trial, "stored_shapes", lambda directory: looked.append(directory) or stored_shapes(directory))
    spec = ModelSpec(path=str(tmp_path))
    assert class_problems(spec) == class_problems(spec) == []
    assert len(looked) == 1
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"attention_bias": True}))
    assert class_problems(spec) == class_problems(spec) != []
    assert len(looked) == 2
