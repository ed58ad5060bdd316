"""Parts of tensors read from a model's files, and files that are missing or damaged."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rlcore.spi import ModelError, ModelSpec
from rlcore_torchkit.huggingface.models import load_model
from rlcore_torchkit.huggingface.safetensors_files import MAX_NAMED, TensorFiles, model_file, open_tensors, weight_files

TENSORS = {
    "a": torch.arange(12.0).view(3, 4),
    "b": torch.arange(6, dtype=torch.bfloat16),
    "c": torch.tensor(2.0),
}


@pytest.fixture
def sharded(tmp_path: Path) -> ModelSpec:
    """TENSORS in two files and their index."""
    places = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    for file in set(places.values()):
        save_file({name: tensor for name, tensor in TENSORS.items() if places[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return ModelSpec(path=str(tmp_path))


def test_blocks_of_tensors_of_several_files(sharded: ModelSpec) -> None:
    assert [file.name for file in weight_files(sharded)] == ["one.safetensors", "two.safetensors"]
    with open_tensors(sharded) as files:
        assert {name: files.shape(name) for name in TENSORS} == {"a": (3, 4), "b": (6,), "c": ()}
        assert ("a" in files, "d" in files) == (True, False)
        assert torch.equal(files.read("a", [slice(1, 3), slice(0, 2)], torch.float32), TENSORS["a"][1:3, :2])
        block = files.read("b", [slice(2, 5)], torch.bfloat16)
        assert block.dtype == torch.bfloat16
        assert torch.equal(block, TENSORS["b"][2:5])


@pytest.mark.parametrize(
    ("held", "known", "found"),
    [
        ({"new.a"}, {"a"}, {"a": "new.a"}),
        ({"new.a"}, {"new.a"}, {"new.a": "new.a"}),
        ({"new.a"}, {"b"}, {"new.a": "new.a"}),
        ({"new.a", "a"}, {"a"}, {"new.a": "new.a", "a": "a"}),
        ({"new.a", "b"}, {"a", "b"}, {"a": "new.a", "b": "b"}),
        ({"an.other"}, {"a", "other"}, {"an.other": "an.other"}),
    ],
    ids=["renamed", "known", "unknown", "twice", "mixed", "another prefix"],
)
def test_tensors_of_another_prefix(held: set[str], known: set[str], found: dict[str, str], tmp_path: Path) -> None:
    values = {name: torch.tensor([float(number)]) for number, name in enumerate(sorted(held))}
    save_file(values, tmp_path / "model.safetensors")
    with open_tensors(ModelSpec(path=str(tmp_path))) as opened:
        files = opened.renamed({"new.": ""}, known)
        assert {name: files.read(name, [slice(0, 1)], torch.float32) for name in files.tensors} == {
            name: values[stored] for name, stored in found.items()
        }
        assert {files.shape(name) for name in found} == {(1,)}
        assert files.places.keys() == found.keys()


def test_numbers_that_are_infinite_in_the_dtype_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.tensor([1e300], dtype=torch.float64)}, tmp_path / "model.safetensors")
    with open_tensors(ModelSpec(path=str(tmp_path))) as files:
        assert files.read("a", [slice(0, 1)], torch.float64) == 1e300
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            files.read("a", [slice(0, 1)], torch.float32)


def test_one_file_holds_all_tensors(model_directory: Callable[[str], Path]) -> None:
    directory = model_directory("qwen3")
    expected = load_file(directory / "model.safetensors")
    with open_tensors(ModelSpec(path=str(directory))) as files:
        assert {name: files.shape(name) for name in files.tensors} == {name: tuple(t.shape) for name, t in expected.items()}


def test_a_missing_shard_is_named(sharded: ModelSpec) -> None:
    (Path(sharded.path) / "two.safetensors").unlink()
    with pytest.raises(ModelError) as raised:
        weight_files(sharded)
    (problem,) = raised.value.problems
    assert (problem.path, problem.found) == (sharded.path, "no two.safetensors")


def test_a_file_that_cannot_be_read_is_named(sharded: ModelSpec) -> None:
    broken = Path(sharded.path) / "one.safetensors"
    broken.write_bytes(b"not tensors")
    with pytest.raises(ModelError) as raised, open_tensors(sharded):
        pass
    assert [problem.path for problem in raised.value.problems] == [str(broken)]


@pytest.mark.parametrize("error", [OSError("Input/output error"), SafetensorError("invalid offset")])
def test_a_tensor_that_cannot_be_read_is_named_with_its_file(error: Exception) -> None:
    def fail(_: object) -> None:
        raise error

    files = TensorFiles(path="model", tensors={"a": SimpleNamespace(get_slice=fail)}, places={"a": Path("model/one")})
    with pytest.raises(ModelError) as raised:
        files.read("a", [slice(0, 1)], torch.float32)
    assert [(problem.path, problem.found) for problem in raised.value.problems] == [("model/one", f"a: {error}")]


def test_files_of_a_directory_below_the_home_directory(sharded: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path(sharded.path).parent
    monkeypatch.setenv("HOME", str(home))
    spec = ModelSpec(path=f"~/{Path(sharded.path).name}")
    assert model_file(spec, "one.safetensors") == Path(sharded.path) / "one.safetensors"
    assert model_file(spec, "three.safetensors") is None


def test_a_model_that_the_hub_does_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError) as raised:
        weight_files(ModelSpec(path="acme/not-a-model"))
    assert [problem.path for problem in raised.value.problems] == ["acme/not-a-model"]


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_model(model_directory: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot of acme/model in the Hub's cache, which the test may damage: links to files that are elsewhere."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--acme--model"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    shutil.copytree(model_directory("qwen3"), repository / "blobs")
    for file in (repository / "blobs").iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    return snapshot


def damage(snapshot: Path, what: str) -> None:
    weights, index = snapshot / "model.safetensors", snapshot / "model.safetensors.index.json"
    match what:
        case "index beside a single file":
            index.write_text(
                json.dumps({"metadata": {}, "weight_map": dict.fromkeys(load_file(weights), "model-1.safetensors")})
            )
            shutil.copy(weights, snapshot / "model-1.safetensors")
        case "index that names a file outside":
            weights.rename(snapshot.parent / "other.safetensors")
            index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": "../other.safetensors"}}))
        case "index without a map":
            index.write_text("{}")
        case "index that is none":
            index.write_text("[" * 100_000)
        case "weights that are cut short":
            weights.write_bytes(weights.read_bytes()[:-1])
        case "config.json of another model":
            config = snapshot / "config.json"
            config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 1, "layer_types": None}))
        case "adapter beside weights":
            (snapshot / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("index beside a single file", "model.safetensors beside model.safetensors.index.json"),
        ("index that names a file outside", "the file ../other.safetensors"),
        ("index without a map", "no weight_map"),
        ("index that is none", "no valid JSON"),
        ("weights that are cut short", "bytes"),
        ("config.json of another model", "weights of 2 layers"),
        ("adapter beside weights", "adapter_config.json beside model.safetensors"),
    ],
)
@pytest.mark.parametrize("read", [weight_files, lambda spec: load_model(spec, dtype=torch.float32)], ids=["files", "model"])
def test_files_from_the_hub_are_checked_as_directories_are(
    read: Callable[[ModelSpec], object], what: str, found: str, hub_model: Path
) -> None:
    damage(hub_model, what)
    with pytest.raises(ModelError, match=re.escape(found)):
        read(ModelSpec(path="acme/model"))


@pytest.mark.parametrize("has_index", [False, True])
def test_a_model_in_the_cache_of_the_hub(has_index: bool, hub_model: Path) -> None:
    spec = ModelSpec(path="acme/model")
    if has_index:  # of the one file
        places = dict.fromkeys(load_file(hub_model / "model.safetensors"), "model.safetensors")
        (hub_model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert weight_files(spec) == [hub_model / "model.safetensors"]
    assert sum(1 for _ in load_model(spec, dtype=torch.float32).parameters()) > 0


@pytest.mark.parametrize(("count", "last"), [(1, "wrong 0"), (MAX_NAMED, f"wrong {MAX_NAMED - 1}"), (MAX_NAMED + 3, "3 more")])
def test_many_problems_are_counted_and_the_first_named(count: int, last: str) -> None:
    files = TensorFiles(path="model", tensors={}, places={})
    files.raise_problems([])
    with pytest.raises(ModelError) as raised:
        files.raise_problems([files.problem(f"wrong {number}", "right") for number in range(count)])
    found = [problem.found for problem in raised.value.problems]
    assert found[0] == "wrong 0"
    assert found[-1].startswith(last)
    assert len(found) == min(count, MAX_NAMED + 1)
    assert {problem.path for problem in raised.value.problems} == {"model"}
