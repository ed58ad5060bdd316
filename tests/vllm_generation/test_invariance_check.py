"""Options beside which an engine's tokens are not the same in every batch, each with its key."""

import pytest
from attrs import evolve

from rlcore.spi import LoraSpec
from rlcore_torchkit.distributed.format_bytes import GIB
from rlcore_torchkit.huggingface import batch_invariance
from rlcore_vllm.checks import check as check_module
from rlcore_vllm.checks.check import check
from rlcore_vllm.setup.config import VllmConfig

OPTION = "generator.vllm.batch_invariant"


@pytest.fixture
def context(invariant_context, monkeypatch):
    monkeypatch.setattr(check_module, "device_memories", lambda: [80 * GIB] * 2)
    monkeypatch.setattr(check_module, "meant_for", lambda: {"cpu", "cuda"})
    return invariant_context


def problems(context, **options):
    config = VllmConfig(batch_invariant=True, gpu_memory_utilization=0.5, **options)
    return [(one.path, one.found) for one in check(context, config)]


def test_what_it_is_for(context):
    assert problems(context) == problems(context, replicas=2, prefix_caching=False, engine={"block_size": 32}) == []
    assert problems(context, tensor_parallel=2, devices=(0, 1)) == []


def test_other_options(context):
    found = problems(
        evolve(context, generator_lora=LoraSpec()),
        quantization="fp8",
        kv_cache_dtype="fp8",
        speculative_ngram=2,
        engine={"attention_backend": "FLASHINFER", "compilation_config": {"mode": 3}},
    )
    asked = {path for path, text in found if "batch_invariant" in text}
    sections = {"quantization", "kv_cache_dtype", "speculative_ngram"}
    sections |= {"engine.attention_backend", "engine.compilation_config"}
    assert asked == {f"generator.vllm.{key}" for key in sections}
    assert ("refit.adapters", "unmerged adapters") in found


def test_devices(context, monkeypatch):
    monkeypatch.setattr(batch_invariance, "compute_capabilities", lambda: [(8, 0)])
    assert problems(context) == [(OPTION, "true with compute capability 8.0")]
    assert list(check(context, VllmConfig(gpu_memory_utilization=0.5))) == []
