"""Exported weights and Hugging Face directories against save_pretrained."""

import pytest
import torch
from fsdp2_support import Reference, assert_same, exported, make_batch, step_request
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, conversion_mapping

from rlcore.spi import ExportWeightsRequest, SaveStateRequest, installed_channels
from rlcore_fsdp2.export import Exporter
from rlcore_fsdp2.provider import PROVIDER
from rlcore_torchkit.architectures.registry import installed_model_types
from rlcore_torchkit.huggingface.models import checkpoint_tensors
from rlcore_torchkit.refit.digest import tensor_digest

ARCHITECTURES = installed_model_types()


def request(**changes) -> ExportWeightsRequest:
    return ExportWeightsRequest(**({"weight_version": 0, "dtype": "float32", "max_bucket_bytes": 2**14} | changes))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_export_equals_save_pretrained_bit_by_bit(architecture, tied, model_directory, backend, tmp_path):
    directory = model_directory(architecture, tied)
    trainer = backend(directory)
    assert_same(exported(trainer), Reference(directory).saved(tmp_path / "wide"), tolerance=0.0)
    narrow = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    narrow.save_pretrained(tmp_path / "narrow")
    assert_same(exported(trainer, dtype="bfloat16"), load_file(tmp_path / "narrow" / "model.safetensors"), tolerance=0.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_buckets_hold_the_specs_in_order_within_the_limit(architecture, dtype, model_directory, backend):
    limit = 5000
    export = backend(model_directory(architecture)).export_weights(request(dtype=dtype, max_bucket_bytes=limit))
    found = []
    for bucket in export.buckets:
        sizes = [named.tensor.nbytes for named in bucket.tensors]
        assert sum(sizes) <= limit or len(sizes) == 1
        for named in bucket.tensors:
            assert named.digest == tensor_digest(named.tensor)
            found.append((named.name, tuple(named.tensor.shape), str(named.tensor.dtype).removeprefix("torch.")))
    assert found == [(spec.name, spec.shape, spec.dtype) for spec in export.specs]


def test_whole_float32_weights_are_exported_without_a_copy_and_follow_the_training(backend):
    trainer = backend()
    export = trainer.export_weights(request())
    assert export.persistent
    held = {named.name: named.tensor for bucket in export.buckets for named in bucket.tensors}
    before = {name: tensor.clone() for name, tensor in held.items()}
    batch = make_batch()
    trainer.train_step(step_request([batch], batch.counts()))
    assert_same(held, exported(trainer, 1), tolerance=0.0)
    assert any((held[name] != before[name]).any() for name in held)


@pytest.mark.parametrize(("architecture", "dtype"), [("qwen3", "bfloat16"), ("qwen3_moe", "float32")])
def test_converted_weights_are_not_said_to_persist(architecture, dtype, model_directory, backend):
    assert not backend(model_directory(architecture)).export_weights(request(dtype=dtype)).persistent


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3_moe"])
def test_hf_directory_loads_with_the_trained_weights(architecture, model_directory, backend, tmp_path):
    trainer = backend(model_directory(architecture))
    batch = make_batch()
    trainer.train_step(step_request([batch], batch.counts()))
    result = trainer.save_state(SaveStateRequest(directory=tmp_path, kind="hf"))
    assert set(result.files) == {path.name for path in tmp_path.iterdir()}
    assert "tokenizer.json" in result.files
    assert_same(Reference(tmp_path).saved(tmp_path / "again"), exported(trainer, 1), tolerance=0.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_channel_is_declared_and_finds_whole_torch_tensors_of_one_device(dtype, backend):
    assert all(channel.fits(PROVIDER.capabilities) for channel in installed_channels().values())
    export = backend().export_weights(request(dtype=dtype))
    tensors = [named.tensor for bucket in export.buckets for named in bucket.tensors]
    assert {(type(tensor), tensor.device.type, tensor.is_contiguous()) for tensor in tensors} == {(torch.Tensor, "cpu", True)}


@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen3"])
def test_how_checkpoints_hold_a_model_is_looked_up_once(architecture, model_directory, monkeypatch):
    """Not for each fused tensor, in all modules of the model; and what is exported is the same."""
    directory = model_directory(architecture, tied=False)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    expected = checkpoint_tensors(model)
    look, looks = conversion_mapping.get_model_conversion_mapping, []
    monkeypatch.setattr(
        conversion_mapping, "get_model_conversion_mapping", lambda *args, **kwargs: (looks.append(1), look(*args, **kwargs))[1]
    )
    exporter = Exporter(model)
    export = exporter.export(request(dtype="float32"), dict(model.named_parameters()), torch.device("cpu"))
    found = {named.name: named.tensor for bucket in export.buckets for named in bucket.tensors}
    assert len(looks) == 1
    assert list(found) == [spec.name for spec in export.specs]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
