"""Writing Hugging Face model directories."""

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from attrs import evolve
from torch import Tensor

from rlcore.spi import ContractError, ModelSpec, Problem, StorageError, TensorSpec, WeightBucket, WeightExport
from rlcore_model_files.directory import model_problems
from rlcore_torchkit.huggingface import hf_directory
from rlcore_torchkit.huggingface.hf_directory import model_storage_errors, save_hf, write_hf_directory
from rlcore_torchkit.huggingface.models import architecture_problems
from rlcore_torchkit.refit.digest import make_buckets
from rlcore_torchkit.testing.models import make_model


def check_model(path: str) -> list[Problem]:
    """What the core checks, and what torchkit does."""
    return [*model_problems(path), *architecture_problems(path)]


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


def test_what_a_model_keeps_in_its_own_dtype_is_written_in_it(model_directory: Callable[[str], Path], tmp_path: Path) -> None:
    export = make_export({"a": torch.tensor([1 / 3]), "b": torch.tensor([1 / 3])})
    specs = tuple(evolve(spec, keeps_dtype=spec.name == "b") for spec in export.specs)
    write_hf_directory(evolve(export, specs=specs), str(model_directory("llama")), tmp_path, "bfloat16", max_shard_bytes=3)
    found = read_tensors(tmp_path)
    assert {name: tensor.dtype for name, tensor in found.items()} == {"a": torch.bfloat16, "b": torch.float32}
    assert found["b"].item() == torch.tensor(1 / 3).item()
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"] == {"total_size": 2 + 4}


OWN_CODE = {"AutoModelForCausalLM": "own.Own", "AutoTokenizer": ["own.Slow", None]}


@pytest.mark.parametrize("on_hub", [False, True])
def test_code_of_a_models_own_is_found_again(
    on_hub: bool, model_directory: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(shutil.copytree(model_directory("llama"), tmp_path / "source"))
    (source / "own.py").write_text("import helper\n")
    (source / "helper.py").write_text("")
    config = json.loads((source / "config.json").read_text()) | {"auto_map": OWN_CODE}
    (source / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((source / "tokenizer_config.json").read_text()) | {"auto_map": {"AutoTokenizer": ["own.Slow", None]}}
    (source / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    written = tmp_path / "written"
    written.mkdir()
    if on_hub:
        files = {file.name: file for file in source.iterdir()}
        monkeypatch.setattr(hf_directory, "model_file", lambda spec, name: files.get(name))
    write_hf_directory(make_export({"a": torch.ones(1)}), "us/model" if on_hub else str(source), written, "float32")
    found = json.loads((written / "config.json").read_text())["auto_map"]
    named = {"AutoModelForCausalLM": "us/model--own.Own", "AutoTokenizer": ["us/model--own.Slow", None]}
    assert found == (named if on_hub else OWN_CODE)
    tokenizer = json.loads((written / "tokenizer_config.json").read_text())["auto_map"]
    assert tokenizer["AutoTokenizer"] == found["AutoTokenizer"]
    assert sorted(file.name for file in written.glob("*.py")) == ([] if on_hub else ["helper.py", "own.py"])


@pytest.mark.parametrize("on_hub", [False, True])
def test_all_of_a_tokenizers_files_are_written(
    on_hub: bool, model_directory: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(shutil.copytree(model_directory("llama"), tmp_path / "source"))
    files = ("tekken.json", "tokenizer.model.v3", "spiece.model", "vocab.txt", "additional_chat_templates/tool_use.jinja")
    (source / "additional_chat_templates").mkdir()
    for name in (*files, "adapter_config.json"):
        (source / name).write_text(name)
    if on_hub:
        left = {**{file.name: file for file in source.iterdir()}, "merges.txt": source / "vocab.txt"}
        monkeypatch.setattr(hf_directory, "model_file", lambda spec, name: left.get(name))
    written = tmp_path / "written"
    written.mkdir()
    names = write_hf_directory(make_export({"a": torch.ones(1)}), "us/model" if on_hub else str(source), written, "float32")
    assert set(files) <= set(names)
    assert [(written / name).read_text() for name in files] == list(files)
    assert ("merges.txt" in names) == on_hub
    assert not (written / "adapter_config.json").exists()


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
        with pytest.raises(StorageError, match=r"No space left on device. Make room"), model_storage_errors(tmp_path):
            raise error
    with pytest.raises(SafetensorError, match="another"), model_storage_errors(tmp_path):
        raise SafetensorError("another")


def test_a_missing_target_is_a_storage_error(model_directory: Callable[[str], Path], tmp_path: Path) -> None:
    source = model_directory("qwen2")
    with pytest.raises(StorageError, match="missing"):
        write_hf_directory(make_export(read_tensors(source)), str(source), tmp_path / "missing", "float32")


def test_a_rank_whose_write_fails_takes_part_in_the_export_to_its_end(
    model_directory: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others wait for it in each bucket."""
    model, export = ModelSpec(path=str(model_directory("qwen2"))), make_export(read_tensors(model_directory("qwen2")))
    monkeypatch.setattr(hf_directory, "write_hf_directory", partial(write_hf_directory, max_shard_bytes=5000))
    with pytest.raises(StorageError, match="missing"):
        save_hf(lambda _: export, model, tmp_path / "missing", rank=0, weight_version=3)
    assert next(export.buckets, None) is None


def test_a_model_on_the_hub_that_is_gone_at_the_end_is_a_storage_error(
    model_directory: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no connection")

    monkeypatch.setattr("transformers.utils.cached_file", refuse)
    tensors = read_tensors(model_directory("qwen2"))
    with pytest.raises(StorageError, match="no connection"):
        write_hf_directory(make_export(tensors), "acme/tiny", tmp_path, "float32")
