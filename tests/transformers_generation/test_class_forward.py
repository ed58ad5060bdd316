"""Models that no family describes: what is generated of them against a plain forward pass of transformers' class."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "fsdp2_backend"))

from decoder_families import BASE, OWN_ATTENTION, REFUSED, TRAINED, make_family

from rlcore.spi import ModelError
from rlcore_torchkit.huggingface.models import checkpoint_tensors
from rlcore_transformers.class_forward import ClassDecoder

GENERATED = {**TRAINED, **OWN_ATTENTION}
BY_ITSELF = "computes attention by itself"
TOLERANCES = {"nemotron_h": 1e-3}
"""Of states that many products round, where it is not 1e-4."""


@pytest.fixture(scope="module", params=GENERATED)
def family(request, tmp_path_factory) -> Path:
    """A tiny random model of each."""
    return make_family(tmp_path_factory.mktemp("families") / request.param, request.param, GENERATED[request.param])


def assert_logprobs(tools, directory, prompts, result, tolerance):
    """Each token's log-probability is that of its sequence alone."""
    for prompt, tokens, logprobs in zip(prompts, tools.split(result), tools.split(result, "logprobs"), strict=True):
        logits = tools.reference_logits(directory, [*prompt, *tokens])[len(prompt) - 1 : -1]
        expected = tools.log_softmax(logits)[np.arange(len(tokens)), tokens]
        np.testing.assert_allclose(logprobs, expected, atol=tolerance, rtol=0)


def test_log_probabilities_are_those_of_a_plain_forward_pass(tools, family):
    """Prompts and answers of several lengths, more than there are places, longer than windows; after a refit too."""
    backend = tools.make_backend(family, max_batch_size=3)
    prompts = tools.random_prompts([3, 9, 1, 7, 5])
    limits = [14, 3, 9, 12, 6]
    result = backend.generate(tools.make_request(prompts, max_tokens=limits, temperature=1.0))
    assert [len(tokens) for tokens in tools.split(result)] == limits
    tolerance = TOLERANCES.get(family.name, 1e-4)
    assert_logprobs(tools, family, prompts, result, tolerance)
    weights = {name: tensor * 1.05 for name, tensor in tools.checkpoint_tensors(family).items()}
    digests = tools.refit(backend, tools.make_export(weights, version=1))
    assert digests == {name: tools.digest_of(tensor) for name, tensor in weights.items()}
    after = backend.generate(tools.make_request(prompts, max_tokens=limits, version=1))
    assert not np.allclose(after.logprobs[: limits[0]], result.logprobs[: limits[0]], atol=1e-3)
    moved = make_changed(family, weights)
    assert_logprobs(tools, moved, prompts, after, tolerance)


def make_changed(family, weights):
    """A copy of a model's directory with other weights."""
    import shutil

    from safetensors.torch import save_file

    directory = family.with_name(f"{family.name}-changed")
    shutil.copytree(family, directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_lower_precision_stays_near(tools, tmp_path, name):
    """Capped scores and sinks have no kernel; windows in bfloat16 go to torch's."""
    directory = make_family(tmp_path / name, name, TRAINED[name])
    backend = tools.make_backend(directory, dtype="bfloat16")
    prompts = tools.random_prompts([9, 4])
    assert_logprobs(tools, directory, prompts, backend.generate(tools.make_request(prompts, max_tokens=10)), 0.5)


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_trainer_refuses_is_refused_here_too(tools, tmp_path, name):
    options, reason = REFUSED[name]
    directory = make_family(tmp_path / name, name, options)
    with pytest.raises(ModelError, match=reason):
        tools.make_backend(directory)


@pytest.mark.parametrize(
    ("name", "options", "forgotten"),
    [
        ("gemma2", {"attn_logit_softcapping": 0.05}, "softcap"),
        ("olmo3", {"sliding_window": 64}, "window"),  # which a trial of a few tokens would not see
    ],
)
def test_a_class_whose_attention_is_not_the_interfaces_computes_by_itself(
    tools, tmp_path, monkeypatch, caplog, name, options, forgotten
):
    import rlcore_torchkit.layers.packed_attention as module

    directory = make_family(tmp_path / name, name, {**TRAINED[name], **options})
    whole = module.Scores
    monkeypatch.setattr(module, "Scores", lambda **given: whole(**{**given, forgotten: None}))
    backend = tools.make_backend(directory)
    assert BY_ITSELF in caplog.text
    prompts = tools.random_prompts([3, 9])
    assert_logprobs(tools, directory, prompts, backend.generate(tools.make_request(prompts)), 1e-4)


def test_attention_that_hardly_matters_in_a_trial_is_still_computed(caplog):
    options = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", **options))
    for layer in model.transformer.h:
        torch.nn.init.zeros_(layer.self_attention.dense.weight)
    decoder = ClassDecoder(model, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        decoder.bind(checkpoint_tensors(model))
    assert BY_ITSELF in caplog.text


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gemma2", {"final_logit_softcapping": 0.5}),
        ("recurrent_gemma", {"lru_width": 32, "num_hidden_layers": 3, "logits_soft_cap": 0.5}),
        ("xlstm", {"num_heads": 4, "chunk_size": 8, "output_logit_soft_cap": 0.5}),
    ],
)
def test_logits_are_capped_by_the_name_that_the_class_has(name, options):
    config = AutoConfig.for_model(name, **{**BASE, "vocab_size": 64, **options})
    model = AutoModelForCausalLM.from_config(config)
    decoder = ClassDecoder(model, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        decoder.bind(checkpoint_tensors(model))
        logits = decoder.logits(torch.full((1, 32), 100.0))
    assert logits.shape == (1, 64)
    assert logits.abs().max() <= 0.5


def test_the_weights_are_used_as_they_are(tools, tmp_path):
    """Where checkpoints have them as the class computes with them: what changes in place changes what is generated."""
    directory = make_family(tmp_path / "phi", "phi", TRAINED["phi"])
    backend = tools.make_backend(directory, fill=False)
    weights = tools.checkpoint_tensors(directory)
    tools.refit(backend, tools.make_export(weights, persistent=True), may_alias=True)
    request = tools.make_request(tools.random_prompts([4]))
    before = backend.generate(request).logprobs
    for tensor in weights.values():
        tensor.zero_()
    after = backend.generate(request).logprobs
    assert not np.allclose(before, after)
    vocab_size = tools.reference_model(directory).config.vocab_size
    np.testing.assert_allclose(after, -np.log(vocab_size), atol=1e-5)
