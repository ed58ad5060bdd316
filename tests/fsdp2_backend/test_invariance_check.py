"""Options beside which the trainer does not compute by batch-invariant kernels, each with its key."""

import json

import pytest
from attrs import evolve
from packaging.version import Version

from rlcore.spi import CheckContext, LoraSpec, ModelSpec
from rlcore_fsdp2.check import check
from rlcore_fsdp2.config import Fsdp2Config
from rlcore_torchkit import batch_invariance

OPTION = "trainer.fsdp2.batch_invariant"


@pytest.fixture
def context(model_directory, tmp_path, monkeypatch):
    """On a Hopper with vLLM, a Qwen3 of heads and a vocabulary that the kernels are for."""
    monkeypatch.setattr(batch_invariance, "compute_capabilities", lambda: [(9, 0)])
    monkeypatch.setattr(batch_invariance, "installed_version", lambda name: Version("0.26.0"))
    changed = json.loads((model_directory("qwen3") / "config.json").read_text()) | {"head_dim": 128, "vocab_size": 128}
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(changed))
    model = ModelSpec(path=str(directory), dtype="bfloat16")
    return CheckContext(model=model, device="cuda", world_size=1, max_sequence_length=64, channel="cuda_ipc")


def problems(context, **options):
    return [(one.path, one.found) for one in check(context, Fsdp2Config(batch_invariant=True, **options))]


def test_what_they_are_for(context):
    assert problems(context) == problems(context, activation_checkpointing=True) == []


def test_without_the_option_nothing_is_asked(context, monkeypatch):
    monkeypatch.setattr(batch_invariance, "installed_version", lambda name: None)
    assert problems(context) == [(OPTION, "true, without vLLM for CUDA")]
    assert list(check(context, Fsdp2Config())) == []


def test_other_options(context):
    found = problems(
        evolve(context, world_size=8, lora=LoraSpec()), tensor_parallel=2, context_parallel=2, fp8=True, compile_layers=True
    )
    asked = {(path, text) for path, text in found if "batch_invariant" in text or path == OPTION}
    assert asked == {
        ("trainer.fsdp2.tensor_parallel", "2, with batch_invariant"),
        ("trainer.fsdp2.context_parallel", "2, with batch_invariant"),
        ("trainer.fsdp2.fp8", "true, with batch_invariant"),
        ("trainer.fsdp2.compile_layers", "true, with batch_invariant"),
        (OPTION, "true, with [lora]"),
    }


def test_the_reference_too_is_of_the_family(context, model_directory):
    other = ModelSpec(path=str(model_directory("llama")), dtype="bfloat16")
    assert problems(evolve(context, reference=other, needs_reference=True)) == [(OPTION, "true, for model_type llama")]
    assert problems(evolve(context, reference=context.model, needs_reference=True)) == []
