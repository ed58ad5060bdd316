"""vLLM against transformers, family by family: some in each run of the tests, more in the long ones."""

import json

import pytest
import torch

pytest.importorskip("vllm")

from rlcore_torchkit.testing.families import engine_command
from rlcore_torchkit.testing.families.engine_outcome import EngineOutcome
from rlcore_torchkit.testing.families.engine_trial import try_family
from rlcore_vllm.families.sizes import OPTIONS
from rlcore_vllm.families.tried import TriedVllm
from rlcore_vllm.ranks.loading import Loader

SOME = ["llama", "qwen3_moe"]
"""Fused projections; experts and a tied head."""
MORE = [
    "apertus",
    "bloom",
    "cohere2",
    "deepseek_v3",
    "exaone_moe",
    "falcon_h1",
    "gpt2",
    "mellum",
    "olmo2",
    "zamba2",
]
"""Corrected activations and windows, latent attention, parameters with several names, states, clamped steps of time, transposed
tensors, classes of transformers."""


@pytest.fixture(scope="module")
def engine():
    return TriedVllm("cpu")


@pytest.fixture(scope="module")
def families(engine):
    return engine.families()


@pytest.fixture(autouse=True)
def _one_thread(free_process):
    torch.set_num_threads(1)


@pytest.mark.wide(keep=SOME)
@pytest.mark.parametrize("name", [*SOME, *MORE])
def test_a_family_agrees_with_transformers(name, engine, families, tmp_path):
    outcome = try_family(engine, families[name], "float32", tmp_path)
    assert outcome.verdict == "agrees", outcome.line
    assert 0 < outcome.num_changed < outcome.num_tensors


def spoiled(load, name, factor):
    """Return Loader.load for tensors of which one is multiplied first."""

    def load_spoiled(self, tensors, *arguments):
        return load(self, [(key, tensor * factor if key == name else tensor) for key, tensor in tensors], *arguments)

    return load_spoiled


@pytest.mark.wide(keep=["samples", "a fused tensor"])
@pytest.mark.parametrize(
    ("name", "factor", "reason"),
    [
        ("model.layers.1.self_attn.k_proj.weight", 2.0, "from transformers' after refit 1"),
        ("model.layers.1.self_attn.k_proj.weight", 1 + 1e-6, "model.layers.1.self_attn.qkv_proj.weight of 1"),
        ("model.norm.weight", 1 + 1e-6, "model.norm.weight of 1"),
    ],
    ids=["samples", "a fused tensor", "a tensor by itself"],
)
def test_a_wrong_refit_is_found(name, factor, reason, engine, families, tmp_path, monkeypatch):
    """By samples, and where these hardly change by the digests of what the engine holds, also of fused and packed tensors."""
    monkeypatch.setattr(Loader, "load", spoiled(Loader.load, name, factor))
    outcome = try_family(engine, families["llama"], "float32", tmp_path)
    assert outcome.verdict == "wrong", outcome.line
    assert reason in outcome.reason


def test_what_vllm_attends_to_otherwise_is_refused(engine, families, tmp_path):
    outcome = try_family(engine, families["hrm_text"], "float32", tmp_path)
    assert outcome.verdict == "refused"
    assert "prompts" in outcome.reason


def test_options_name_families_that_there_are(families):
    assert OPTIONS.keys() <= families.keys()


@pytest.mark.wide
def test_the_command_tries_families_in_children(tmp_path):
    file = tmp_path / "outcomes.json"
    arguments = ["--families", "gpt2,gemma2", "--device", "cpu", "--json", str(file), "--jobs", "2"]
    assert engine_command.main(TriedVllm, arguments) == 0
    record = json.loads(file.read_text())
    outcomes = [EngineOutcome(**content) for content in record["outcomes"]]
    assert [(outcome.model_type, outcome.verdict) for outcome in outcomes] == [("gpt2", "agrees"), ("gemma2", "refused")]
    assert record["versions"].startswith("vLLM ")
