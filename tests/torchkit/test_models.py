"""Checking, loading and writing of Hugging Face model directories."""

import errno
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.model_files import model_problems
from rlcore.spi import ContractError, ModelError, ModelSpec, Problem, StorageError, TensorSpec, WeightBucket, WeightExport
from rlcore.testing.models import make_model
from rlcore_torchkit.attention import PACKED_ATTENTION
from rlcore_torchkit.buckets import make_buckets
from rlcore_torchkit.hf_directory import storage_errors, write_hf_directory
from rlcore_torchkit.models import architecture_of, architecture_problems, load_config, load_model


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
    assert architecture_of(load_config(ModelSpec(path=str(directory)))).lower().startswith(architecture.replace("_", ""))


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "gpt2", "org_1/some.model-v2"])
def test_hub_names_are_accepted_without_a_network(name: str) -> None:
    assert check_model(name) == []


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
            (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
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
            edit_config(directory, vocab_size=json.loads((directory / "config.json").read_text())["vocab_size"] - 2)
        case "broken generation settings":
            (directory / "generation_config.json").write_text("{")
        case "odd generation settings":
            (directory / "generation_config.json").write_text('{"eos_token_id": ["<|end|>"]}')


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("config", "no config.json"),
        ("broken config", "no valid JSON"),
        ("list config", "found list"),
        ("architecture", "architecture BertModel; expected one of Qwen2ForCausalLM"),
        ("no architecture", "architecture none"),
        ("window", "use_sliding_window = true"),
        ("weights", "no weights"),
        ("shard", "no b.safetensors, c.safetensors"),
        ("index", "no weight_map"),
        ("tokenizer", "no tokenizer"),
        (
            "short weights",
            r"model.safetensors: found [\d,]+ bytes; expected [\d,]+ bytes, as its header says. Copy or download",
        ),
        ("hardly any weights", r"model.safetensors: found 100 bytes; expected [\d,]+ bytes"),
        ("long weights", "more than its header speaks of"),
        ("no weights but text", "model.safetensors: found a header that is none of safetensors"),
        ("empty weights", "model.safetensors: found 0 bytes"),
        ("pointer", "found a pointer of Git LFS"),
        ("bitsandbytes", "config.json: found weights quantised by bitsandbytes"),
        ("broken tokenizer", "tokenizer.json: found no valid JSON"),
        ("broken tokenizer settings", "tokenizer_config.json: found list"),
        (
            "large tokenizer",
            r"tokenizer.json: found the token .* of number \d+ and 1 more; expected numbers below \d+, which is",
        ),
        ("broken generation settings", "generation_config.json: found no valid JSON"),
        ("odd generation settings", r'generation_config.json: found eos_token_id = \["<|end|>"\]; expected a token number'),
    ],
)
def test_each_defect_is_named_and_refused(what: str, found: str, model_copy: Path) -> None:
    damage(model_copy, what)
    (problem,) = check_model(str(model_copy))
    assert found in str(problem) or re.search(found.replace("|", r"\|"), str(problem))
    assert str(model_copy) in str(problem)
    with pytest.raises(ModelError, match=found.replace("|", r"\|")):
        load_model(ModelSpec(path=str(model_copy)), dtype=torch.float32)


def test_all_defects_are_reported_at_once(model_copy: Path) -> None:
    for what in ("architecture", "weights", "tokenizer"):
        damage(model_copy, what)
    assert len(check_model(str(model_copy))) == 3


def test_missing_directories_and_files(tmp_path: Path) -> None:
    assert "no such directory" in str(check_model(str(tmp_path / "missing"))[0])
    (tmp_path / "file").write_text("")
    assert "a file" in str(check_model(str(tmp_path / "file"))[0])


def test_damaged_weights_are_a_model_error(model_copy: Path) -> None:
    (model_copy / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(ModelError, match=r"model\.safetensors: found"):
        load_model(ModelSpec(path=str(model_copy)), dtype=torch.float32)


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
        "import sys, rlcore_torchkit.models as m; from rlcore.model_files import model_problems; "
        "m.architecture_problems('a/b'); model_problems('a/b'); print({'torch', 'transformers'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def read_tensors(directory: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def make_export(tensors: dict[str, Tensor], *, max_bucket_bytes: int = 5000) -> WeightExport:
    """An export whose buckets are overwritten when the next one is taken, as a trainer may do."""
    specs = tuple(TensorSpec(name=name, shape=tuple(tensor.shape), dtype="float32") for name, tensor in tensors.items())

    def buckets() -> Iterator[WeightBucket]:
        for bucket in make_buckets(((name, tensor.clone()) for name, tensor in tensors.items()), max_bucket_bytes):
            yield bucket
            for named in bucket.tensors:
                named.tensor.zero_()

    return WeightExport(weight_version=3, specs=specs, buckets=buckets(), persistent=False)


@pytest.mark.parametrize("max_shard_bytes", [2**30, 40_000])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "llama"])
def test_a_written_directory_is_the_same_model(
    architecture: str, max_shard_bytes: int, model_directory: Callable[[str], Path], tmp_path: Path, plain_model: Callable
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = model_directory(architecture)
    tensors = read_tensors(source)
    files = write_hf_directory(make_export(tensors), str(source), tmp_path, "float32", max_shard_bytes=max_shard_bytes)
    assert sorted(files) == sorted(file.name for file in tmp_path.iterdir())
    assert check_model(str(tmp_path)) == []
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_bytes == 40_000)
    written = read_tensors(tmp_path)
    assert written.keys() == tensors.keys()
    assert "lm_head.weight" not in written
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", attn_implementation="eager")
    for name, parameter in plain_model(architecture).named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter)
    assert (
        AutoTokenizer.from_pretrained(tmp_path)("1+1")["input_ids"] == AutoTokenizer.from_pretrained(source)("1+1")["input_ids"]
    )
    assert loaded.generation_config.eos_token_id == 0


def test_an_untied_head_and_another_dtype(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = make_model(tmp_path / "source", "qwen2", tied=False)
    tensors = read_tensors(source)
    target = tmp_path / "target"
    target.mkdir()
    write_hf_directory(make_export(tensors), str(source), target, "bfloat16")
    written = read_tensors(target)
    assert "lm_head.weight" in written
    assert all(torch.equal(written[name], tensor.bfloat16()) for name, tensor in tensors.items())
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.lm_head.weight, tensors["lm_head.weight"].bfloat16())


@pytest.mark.parametrize(("change", "message"), [("missing", "nothing"), ("surplus", "after the last"), ("order", "expected")])
def test_an_export_that_breaks_its_specs_is_refused(
    change: str, message: str, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    source = model_directory("qwen2")
    export = make_export(read_tensors(source))
    specs = {"missing": (*export.specs, export.specs[0]), "surplus": export.specs[:-1], "order": export.specs[::-1]}[change]
    broken = WeightExport(weight_version=0, specs=specs, buckets=export.buckets, persistent=False)
    with pytest.raises(ContractError, match=message):
        write_hf_directory(broken, str(source), tmp_path, "float32")


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_a_write_that_fails_is_a_storage_error(file: str, model_directory: Callable[[str], Path], tmp_path: Path) -> None:
    """A limit on file sizes fails a real write in the middle, as a full disk does."""
    import resource

    source = model_directory("qwen2")
    limit = (source / file).stat().st_size // 2
    tensors = {"model.norm.weight": torch.zeros(4)} if file == "tokenizer.json" else read_tensors(source)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(StorageError, match="File too large"):
            write_hf_directory(make_export(tensors), str(source), tmp_path, "float32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_named_as_such(tmp_path: Path) -> None:
    from safetensors import SafetensorError

    full = "Error while serializing: I/O error: No space left on device (os error 28)"
    for error in (SafetensorError(full), OSError(errno.ENOSPC, "No space left on device")):
        with pytest.raises(StorageError, match=r"No space left on device. Make room"), storage_errors(tmp_path):
            raise error
    with pytest.raises(SafetensorError, match="another"), storage_errors(tmp_path):
        raise SafetensorError("another")


def test_a_missing_target_is_a_storage_error(model_directory: Callable[[str], Path], tmp_path: Path) -> None:
    source = model_directory("qwen2")
    with pytest.raises(StorageError, match="missing"):
        write_hf_directory(make_export(read_tensors(source)), str(source), tmp_path / "missing", "float32")
