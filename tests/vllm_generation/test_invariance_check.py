"""Options beside which an engine's tokens are not the same in every batch, each with its key."""

import json

import pytest
from attrs import evolve
from packaging.version import Version

from rlcore.spi import CheckContext, LoraSpec, ModelSpec
from rlcore.testing.models import make_model
from rlcore_torchkit import batch_invariance
from rlcore_torchkit.device_memory import GIB
from rlcore_vllm import check as check_module
from rlcore_vllm.check import check
from rlcore_vllm.config import VllmConfig

OPTION = "generator.vllm.batch_invariant"


@pytest.fixture
def context(tmp_path, monkeypatch):
    """On a Hopper, a Qwen3 of heads and a vocabulary that the kernels are for."""
    monkeypatch.setattr(batch_invariance, "compute_capabilities", lambda: [(9, 0)])
    monkeypatch.setattr(batch_invariance, "installed_version", lambda name: Version("0.26.0"))
    monkeypatch.setattr(check_module, "device_memories", lambda: [80 * GIB])
    monkeypatch.setattr(check_module, "meant_for", lambda: {"cpu", "cuda"})
    directory = make_model(tmp_path / "model", "qwen3", head_dim=128)
    changed = json.loads((directory / "config.json").read_text()) | {"vocab_size": 128}
    (directory / "config.json").write_text(json.dumps(changed))
    model = ModelSpec(path=str(directory), dtype="bfloat16")
    return CheckContext(model=model, device="cuda", world_size=1, max_sequence_length=64, channel="cuda_ipc")


def problems(context, **options):
    return [(one.path, one.found) for one in check(context, VllmConfig(batch_invariant=True, **options))]


def test_what_it_is_for(context):
    assert problems(context) == problems(context, replicas=2, prefix_caching=False, engine={"block_size": 32}) == []


def test_other_options(context):
    found = problems(
        evolve(context, generator_lora=LoraSpec()),
        quantization="fp8",
        kv_cache_dtype="fp8",
        speculative_ngram=2,
        tensor_parallel=2,
        devices=(0, 1),
        engine={"attention_backend": "FLASHINFER", "compilation_config": {"mode": 3}},
    )
    asked = {path for path, text in found if "batch_invariant" in text}
    sections = {"quantization", "kv_cache_dtype", "speculative_ngram", "tensor_parallel"}
    sections |= {"engine.attention_backend", "engine.compilation_config"}
    assert asked == {f"generator.vllm.{key}" for key in sections}
    assert ("refit.adapters", "adapters apart from the weights") in found


def test_devices(context, monkeypatch):
    monkeypatch.setattr(batch_invariance, "compute_capabilities", lambda: [(8, 0)])
    assert problems(context) == [(OPTION, "true with compute capability 8.0")]
    assert list(check(context, VllmConfig())) == []
