"""Checking, loading and writing of Hugging Face model directories."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlcore.spi import ModelError, ModelSpec, Problem
from rlcore_model_files.directory import model_problems
from rlcore_torchkit.huggingface.models import architecture_of, architecture_problems, load_config, load_model
from rlcore_torchkit.layers.packed_attention import PACKED_ATTENTION


@pytest.fixture
def model_copy(model_directory: Callable[[str], Path], tmp_path: Path) -> Path:
    """A model directory that the test may damage."""
    return Path(shutil.copytree(model_directory("qwen3"), tmp_path / "model"))


def check_model(path: str) -> list[Problem]:
    """What the core checks, and what torchkit does."""
    return [*model_problems(path), *architecture_problems(path)]


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_good_models_have_no_problems(architecture: str, model_directory: Callable[[str], Path]) -> None:
    directory = model_directory(architecture)
    assert check_model(str(directory)) == []
    assert architecture_of(load_config(ModelSpec(path=str(directory)))).model_type == architecture


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "gpt2", "org_1/some.model-v2"])
def test_hub_names_are_accepted_without_a_network(name: str) -> None:
    assert check_model(name) == []


NEW = {"model_type": "gpt9", "architectures": ["GPT9ForCausalLM"]}
ON_THE_HUB = {
    "newer than transformers": (NEW | {"transformers_version": "99.1.0"}, "model_type gpt9", "transformers>=99.1.0"),
    "with code of its own": (
        NEW | {"auto_map": {"AutoConfig": "own.Config"}},
        "model_type gpt9, whose code comes with the model",
        "model.trust_remote_code",
    ),
    "quantised": (
        {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "quantization_config": {"quant_method": "gptq"}},
        "weights quantised by gptq, as quantization_config says",
        "the model that it was quantised from",
    ),
}


@pytest.mark.parametrize(("content", "found", "remedy"), ON_THE_HUB.values(), ids=ON_THE_HUB)
def test_a_model_on_the_hub_is_refused_before_transformers_looks_for_its_class(
    content: dict, found: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.PreTrainedConfig.get_config_dict", lambda *_, **__: (content, {}))
    with pytest.raises(ModelError) as raised:
        load_config(ModelSpec(path="org/model"), any_decoder=True)
    (problem,) = raised.value.problems
    assert (problem.path, problem.found) == ("org/model", found)
    assert remedy in problem.remedy


def damage(directory: Path, what: str) -> None:
    weights = directory / "model.safetensors"
    match what:
        case "config":
            (directory / "config.json").unlink()
        case "broken config":
            (directory / "config.json").write_text("{")
        case "list config":
            (directory / "config.json").write_text("[]")
        case "architecture":
            edit_config(directory, architectures=["BertModel"])
        case "no architecture":
            edit_config(directory, architectures=None)
        case "window":
            edit_config(directory, use_sliding_window=True)
        case "weights":
            weights.rename(directory / "pytorch_model.bin")
        case "shard":
            weights.rename(directory / "a.safetensors")
            places = {"x": "a.safetensors", "y": "b.safetensors", "z": "c.safetensors"}
            (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
        case "index":
            (directory / "model.safetensors.index.json").write_text("{}")
        case "tokenizer":
            (directory / "tokenizer.json").unlink()
        case "short weights":
            weights.write_bytes(weights.read_bytes()[:-1])
        case "hardly any weights":
            weights.write_bytes(weights.read_bytes()[:100])
        case "long weights":
            weights.write_bytes(weights.read_bytes() + b"x")
        case "no weights but text":
            weights.write_bytes((20).to_bytes(8, "little") + b"<html>not found</html>")
        case "empty weights":
            weights.write_bytes(b"")
        case "pointer":
            weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n")
        case "bitsandbytes":
            edit_config(directory, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
        case "broken tokenizer":
            (directory / "tokenizer.json").write_text('{"model": ')
        case "broken tokenizer settings":
            (directory / "tokenizer_config.json").write_text("[]")
        case "large tokenizer":
            size = json.loads((directory / "config.json").read_text())["vocab_size"]
            tokenizer = json.loads((directory / "tokenizer.json").read_text())
            tokenizer["model"]["vocab"] |= {"beyond": size, "far beyond": size + 1}
            (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
        case "added token":
            settings = {"added_tokens_decoder": {"3": {"content": "<in>"}, "99999": {"content": "<beyond>"}}}
            (directory / "tokenizer_config.json").write_text(json.dumps(settings))
        case "broken generation settings":
            (directory / "generation_config.json").write_text("{")
        case "odd generation settings":
            (directory / "generation_config.json").write_text('{"eos_token_id": ["<|end|>"]}')


@pytest.mark.parametrize(
    ("what", "file", "found"),
    [
        ("config", ".", "no config.json"),
        ("broken config", "config.json", "no valid JSON"),
        ("list config", "config.json", "list"),
        ("architecture", "config.json", "architecture BertModel"),
        ("no architecture", "config.json", "architecture none"),
        ("window", "config.json", "use_sliding_window = true"),
        ("weights", ".", "no weights"),
        ("shard", ".", "no b.safetensors, c.safetensors"),
        ("index", "model.safetensors.index.json", "no weight_map"),
        ("tokenizer", ".", "no tokenizer"),
        ("short weights", "model.safetensors", r"[\d,]+ bytes$"),
        ("hardly any weights", "model.safetensors", "100 bytes$"),
        ("long weights", "model.safetensors", r"[\d,]+ bytes, more than its header speaks of"),
        ("no weights but text", "model.safetensors", "a header that is none of safetensors"),
        ("empty weights", "model.safetensors", "0 bytes$"),
        ("pointer", "model.safetensors", "a pointer of Git LFS"),
        ("bitsandbytes", "config.json", "weights quantised by bitsandbytes"),
        ("broken tokenizer", "tokenizer.json", "no valid JSON"),
        ("broken tokenizer settings", "tokenizer_config.json", "list"),
        ("large tokenizer", "tokenizer.json", r"the token .* of number \d+ and 1 more"),
        ("added token", "tokenizer_config.json", "the token '<beyond>' of number 99999$"),
        ("broken generation settings", "generation_config.json", "no valid JSON"),
        ("odd generation settings", "generation_config.json", r'eos_token_id = \["<\|end\|>"\]'),
    ],
)
def test_each_defect_is_named_and_refused(what: str, file: str, found: str, model_copy: Path) -> None:
    damage(model_copy, what)
    (problem,) = check_model(str(model_copy))
    assert problem.path == str(model_copy / file)
    assert re.match(found, problem.found)
    with pytest.raises(ModelError) as raised:
        load_model(ModelSpec(path=str(model_copy)), dtype=torch.float32)
    assert raised.value.problems == (problem,)


def test_the_size_that_weights_should_have_is_said(model_copy: Path) -> None:
    size = (model_copy / "model.safetensors").stat().st_size
    damage(model_copy, "short weights")
    (problem,) = check_model(str(model_copy))
    assert (problem.found, problem.expected) == (f"{size - 1:,} bytes", f"{size:,} bytes, as its header says")


def test_all_defects_are_reported_at_once(model_copy: Path) -> None:
    for what in ("architecture", "weights", "tokenizer"):
        damage(model_copy, what)
    assert len(check_model(str(model_copy))) == 3


def test_missing_directories_and_files(tmp_path: Path) -> None:
    assert "no such directory" in str(check_model(str(tmp_path / "missing"))[0])
    (tmp_path / "file").write_text("")
    assert "a file" in str(check_model(str(tmp_path / "file"))[0])


@pytest.mark.parametrize(("added", "found"), [(0.0, []), (1.0, ["a head that is not the embedding"])])
def test_a_head_beside_an_embedding_that_is_said_to_be_it(
    monkeypatch: pytest.MonkeyPatch, model_copy: Path, added: float, found: list[str]
) -> None:
    """transformers lets the model have both, and its checkpoints would lack the head. Of a model on the Hub no headers are read
    before."""
    tensors = load_file(model_copy / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + added
    save_file(tensors, model_copy / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr("rlcore_torchkit.huggingface.models.model_problems", lambda _: [])
    problems: Sequence[Problem] = ()
    try:
        load_model(ModelSpec(path=str(model_copy)), dtype=torch.float32)
    except ModelError as error:
        problems = error.problems
    assert [problem.found for problem in problems] == found


def test_damaged_weights_are_a_model_error(model_copy: Path) -> None:
    (model_copy / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(ModelError) as raised:
        load_model(ModelSpec(path=str(model_copy)), dtype=torch.float32)
    assert [problem.path for problem in raised.value.problems] == [str(model_copy / "model.safetensors")]


def test_loading_is_quiet_and_restores_settings(
    model_directory: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging

    settings = logging.get_verbosity(), logging.is_progress_bar_enabled()
    spec = ModelSpec(path=str(model_directory("qwen2")))
    capfd.readouterr()  # what making the model may have printed
    model = load_model(spec, dtype=torch.float32)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == settings
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config._attn_implementation == PACKED_ATTENTION
    empty = load_model(spec, dtype=torch.float32, device="meta")
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert {name: p.shape for name, p in empty.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}


def test_checking_imports_no_torch() -> None:
    code = (
        "import sys, rlcore_torchkit.huggingface.models as m; from rlcore_model_files.directory import model_problems; "
        "m.architecture_problems('a/b'); model_problems('a/b'); print({'torch', 'transformers'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
