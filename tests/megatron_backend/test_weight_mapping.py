"""What a model's files may hold: shards, fused experts, what is missing or of a wrong shape; and exports of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_weights_cases import MODELS, Opened, assert_equal, exported, in_files, opened
from transformers.core_model_loading import revert_weight_conversion

from rlcore.spi import ExportWeightsRequest, ModelError, ModelSpec
from rlcore_megatron.families.models import architecture_of, standard_config
from rlcore_megatron.families.weight_mapping import Names
from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_megatron.weights.export import Exporter
from rlcore_torchkit.huggingface.models import load_config, load_model
from rlcore_torchkit.testing.models import make_model

ONE = ParallelLayout()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weight-files")
    for name, (architecture, tied) in MODELS.items():
        make_model(root / name, architecture, tied=tied, hidden_size=16)
    return root


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
    return Exporter(model.parts, Names.of(model.hf), model.layout, model.groups)


@pytest.mark.parametrize(
    ("grouped", "single"),
    [
        ("mlp.experts.linear_fc1.weight1", "mlp.experts.local_experts.1.linear_fc1.weight"),
        ("mlp.experts.linear_fc2.weight0", "mlp.experts.local_experts.0.linear_fc2.weight"),
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("self_attention.in_proj.layer_norm_weight", "input_layernorm.weight"),
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
    (problem,) = architecture_of(config).layer_problems(standard_config(config), "somewhere/config.json")
    assert (problem.path, problem.found) == ("somewhere/config.json", found)
    with pytest.raises(ModelError) as raised:
        Names.of(config)
    assert [(problem.path, problem.found) for problem in raised.value.problems] == [(config.name_or_path, found)]


def test_the_next_bucket_is_fetched_while_one_is_used(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none after it."""
    started: list[int] = []
    start = Exporter.start_fetch

    def counted(self: Exporter, items: Any, dtype: torch.dtype) -> Any:
        started.append(len(items))
        return start(self, items, dtype)

    monkeypatch.setattr(Exporter, "start_fetch", counted)
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
