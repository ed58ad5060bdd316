"""What a model's files may hold: shards, fused experts, what is missing or of a wrong shape; and exports of one process."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_weights_cases import MODELS, Opened, assert_equal, exported, in_files, opened
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from rlcore.spi import ExportWeightsRequest, ModelError, ModelSpec
from rlcore.testing.models import make_model
from rlcore_megatron.export import Exporter
from rlcore_megatron.layout import ParallelLayout
from rlcore_megatron.weight_mapping import Names, name_problems
from rlcore_torchkit.models import load_config, load_model

ONE = ParallelLayout()


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
    with opened(directory, ONE) as model:
        model.load()
        return model.exported()


@pytest.mark.parametrize("name", MODELS)
def test_export_is_ordered_as_save_pretrained_names_it(models: Path, name: str) -> None:
    model = load_model(ModelSpec(path=str(models / name)), dtype=torch.float32, device="meta")
    expected = [
        (key, tuple(tensor.shape))
        for parameter, value in model.named_parameters()
        for key, tensor in revert_weight_conversion(model, {parameter: value.detach()}).items()
    ]
    with opened(models / name, ONE) as opened_model:
        opened_model.load()
        found = opened_model.exported()
        assert [(key, tuple(tensor.shape)) for key, tensor in found.items()] == expected
        assert_equal(found, in_files(models / name))


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_is_of_one_parameter(models: Path, name: str) -> None:
    with opened(models / name, ONE) as model:
        exporter = exporter_of(model)
        names = [key for keys in exporter.names_of(0).values() for key in keys]
        assert exporter.names_of(0).keys() == dict(model.parts[0].named_parameters()).keys()
        assert exporter.names_of(0)["embedding.word_embeddings.weight"] == ("model.embed_tokens.weight",)
    assert sorted(names) == sorted(in_files(models / name))


def exporter_of(model: Opened) -> Exporter:
    return Exporter(model.parts, model.hf, model.layout, model.groups)


@pytest.mark.parametrize(
    ("grouped", "single"),
    [
        ("mlp.experts.linear_fc1.weight1", "mlp.experts.local_experts.1.linear_fc1.weight"),
        ("mlp.experts.linear_fc2.weight0", "mlp.experts.local_experts.0.linear_fc2.weight"),
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    ],
)
def test_fused_layers_name_the_same_tensors(models: Path, grouped: str, single: str) -> None:
    """Those of TransformerEngine; layers are numbered through, and experts too, on the second of two expert ranks."""
    names = Names.of(load_config(ModelSpec(path=str(models / "qwen3_moe"))))

    class Part:
        def __init__(self, name: str) -> None:
            layer = type("Layer", (), {"layer_number": 2})
            self.decoder = type("Decoder", (), {"layers": [layer]})
            self.names = [f"decoder.layers.0.{name}"]

        def named_parameters(self) -> list[tuple[str, None]]:
            return [(name, None) for name in self.names]

    (fused,), (plain,) = (names.of_model_chunk(Part(name), 1, 2).values() for name in (grouped, single))
    assert fused == plain
    assert all(tensor.name.startswith("model.layers.1.") for tensor in fused.tensors)
    if "experts" in grouped:
        assert fused.expert == 2 + int(grouped[-1])


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


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("attention_bias", True, "attention_bias = true"),
        ("mlp_bias", True, "mlp_bias = true"),
        ("hidden_act", "gelu", 'hidden_act = "gelu"'),
    ],
)
def test_what_megatrons_layers_cannot_hold(models: Path, key: str, value: object, found: str) -> None:
    config = load_config(ModelSpec(path=str(models / "llama")))
    setattr(config, key, value)
    (problem,) = name_problems(config.to_dict(), "somewhere/config.json")
    assert (problem.path, problem.found) == ("somewhere/config.json", found)
    with pytest.raises(ModelError) as raised:
        Names.of(config)
    assert [(problem.path, problem.found) for problem in raised.value.problems] == [(config.name_or_path, found)]


def test_the_next_bucket_is_fetched_while_one_is_used(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none after it."""
    started: list[int] = []
    start = Exporter._start

    def counted(self: Exporter, items: Any, dtype: torch.dtype) -> Any:
        started.append(len(items))
        return start(self, items, dtype)

    monkeypatch.setattr(Exporter, "_start", counted)
    with opened(models / "qwen3", ONE) as model:
        model.load()
        request = ExportWeightsRequest(weight_version=0, dtype="float32", max_bucket_bytes=1 << 12)
        export = exporter_of(model).export(request)
        assert not started
        sizes = []
        for number, bucket in enumerate(export.buckets, 1):
            sizes.append(len(bucket.tensors))
            assert len(started) == number + 1 or len(started) == number == len(sizes)
        assert sizes == started
        assert len(sizes) > 3


def test_export_shows_what_is_in_the_parameters_now(models: Path) -> None:
    """Also where their storage was replaced after the exporter was made, as data parallelism does."""
    with opened(models / "qwen2", ONE) as model:
        model.load()
        exporter = exporter_of(model)
        before = exported(exporter)
        for parameter in model.parts[0].parameters():
            parameter.data = parameter.data + 1.0
        assert_equal(exported(exporter), {name: tensor + 1.0 for name, tensor in before.items()})
