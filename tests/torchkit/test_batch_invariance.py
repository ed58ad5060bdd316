"""Devices, models and channels that the shared kernels are not for, each with the key to change."""

import json
from pathlib import Path

import pytest
from attrs import evolve
from packaging.version import Version

from rlcore.spi import CheckContext, ModelSpec
from rlcore_torchkit.huggingface import batch_invariance
from rlcore_torchkit.huggingface.batch_invariance import invariance_problems

OPTION = "trainer.mine.batch_invariant"


@pytest.fixture
def found(invariant_context, monkeypatch):
    """A function: the problems' paths and what was found, of a model with other keys, a device and a channel."""
    directory = Path(invariant_context.model.path)
    config = json.loads((directory / "config.json").read_text())

    def find(*, version="0.26.0", capabilities=((9, 0),), dtype="bfloat16", device="cuda", channel="cuda_ipc", **changed):
        monkeypatch.setattr(batch_invariance, "compute_capabilities", lambda: capabilities and list(capabilities))
        monkeypatch.setattr(batch_invariance, "installed_version", lambda name: version and Version(version))
        (directory / "config.json").write_text(json.dumps(config | changed))
        model = evolve(invariant_context.model, dtype=dtype)
        context = evolve(invariant_context, model=model, device=device, channel=channel)
        return [(problem.path.removeprefix(f"{directory}/"), problem.found) for problem in invariance_problems(OPTION, context)]

    return find


def test_what_they_are_for(found):
    assert found() == found(capabilities=None) == found(channel=None) == found(channel="directory") == []


def test_vllm(found):
    assert found(version=None) == [(OPTION, "true, without vLLM for CUDA")]
    assert found(version="0.30.1") == [(OPTION, "true, with vLLM 0.30.1")]
    assert found(version="0.26.3+cu130") == []


def test_devices(found):
    assert found(capabilities=[(9, 0), (8, 0), (10, 0)]) == [(OPTION, "true with compute capability 8.0, 10.0")]
    assert found(device="cpu", channel="in_process") == [(OPTION, "true on CPU")]


def test_dtypes_and_channels(found):
    assert found(dtype="float32", channel="nccl") == [
        ("model.dtype", f"float32, with {OPTION}"),
        ("refit.channel", f"nccl, with {OPTION}"),
    ]
    assert found(channel="in_process") == [("refit.channel", f"in_process, with {OPTION}")]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model_type": "llama"}, "true, for model_type llama"),
        ({"model_type": "unheard_of"}, "true, for model_type unheard_of"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_parameters": None}, "rope_type = yarn"),
        ({"attention_bias": True}, "attention_bias = true"),
        ({"head_dim": 64}, "head_dim = 64"),
        ({"vocab_size": 650}, "vocab_size = 650"),
    ],
)
def test_models(found, changed, said):
    ((path, text),) = found(**changed)
    assert text == said
    assert path == (OPTION if "model_type" in changed else "config.json")


def test_values_that_are_malformed_are_left_to_who_says_so(found):
    assert found(vocab_size="many") == []


def test_a_model_on_the_hub_is_judged_once_it_is_loaded(monkeypatch):
    monkeypatch.setattr(batch_invariance, "compute_capabilities", lambda: None)
    monkeypatch.setattr(batch_invariance, "installed_version", lambda name: Version("0.26.0"))
    context = CheckContext(
        model=ModelSpec(path="someone/something", dtype="bfloat16"), device="cuda", world_size=1, max_sequence_length=64
    )
    assert list(invariance_problems(OPTION, context)) == []
    assert list(invariance_problems(OPTION, evolve(context, device="cpu"))) != []
