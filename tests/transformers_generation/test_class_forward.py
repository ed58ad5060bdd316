"""Models that no family describes: what is generated of them against a plain forward pass of transformers' class."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "fsdp2_backend"))

from decoder_families import REFUSED, TRAINED, make_family

from rlcore.spi import ModelError
from rlcore_torchkit.architectures.decoders import state_kinds
from rlcore_torchkit.huggingface.models import checkpoint_tensors
from rlcore_transformers.class_forward import ClassDecoder

STATEFUL = ("qwen3_next", "nemotron_h")
GENERATED = [name for name in TRAINED if name not in STATEFUL]


@pytest.fixture(scope="module", params=GENERATED)
def family(request, tmp_path_factory) -> Path:
    """A tiny random model of each."""
    return make_family(tmp_path_factory.mktemp("families") / request.param, request.param, TRAINED[request.param])


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
    assert_logprobs(tools, family, prompts, result, 1e-4)
    weights = {name: tensor * 1.05 for name, tensor in tools.checkpoint_tensors(family).items()}
    digests = tools.refit(backend, tools.make_export(weights, version=1))
    assert digests == {name: tools.digest_of(tensor) for name, tensor in weights.items()}
    after = backend.generate(tools.make_request(prompts, max_tokens=limits, version=1))
    assert not np.allclose(after.logprobs[: limits[0]], result.logprobs[: limits[0]], atol=1e-3)
    moved = make_changed(family, weights)
    assert_logprobs(tools, moved, prompts, after, 1e-4)


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


@pytest.mark.parametrize("name", STATEFUL)
def test_states_besides_keys_and_values_are_refused(tools, tmp_path, name):
    directory = make_family(tmp_path / name, name, TRAINED[name])
    assert state_kinds(json.loads((directory / "config.json").read_text()))
    with pytest.raises(ModelError, match="linear_attention"):
        tools.make_backend(directory)


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_trainer_refuses_is_refused_here_too(tools, tmp_path, name):
    options, reason = REFUSED[name]
    directory = make_family(tmp_path / name, name, options)
    with pytest.raises(ModelError, match=reason):
        tools.make_backend(directory)


@pytest.mark.parametrize(
    ("name", "reason"), [("gpt_neo", "takes no attention"), ("mpt", "cannot generate"), ("bloom", "no layer")]
)
def test_classes_with_attention_of_their_own_are_refused_before_a_token_is_sampled(name, reason):
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64}
    options |= {
        "gpt_neo": {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
        "bloom": {"hidden_size": 32},
        "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    }[name]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **options))
    if name == "bloom":  # by what it says alone, it would do
        for layer in model.transformer.h:
            torch.nn.init.zeros_(layer.self_attention.dense.weight)
    decoder = ClassDecoder(model, torch.float32, torch.device("cpu"))
    with torch.no_grad(), pytest.raises(ModelError, match=reason):
        decoder.bind(checkpoint_tensors(model))


def test_a_class_that_computes_something_else_is_refused(tools, tmp_path, monkeypatch):
    """Found by the trial, before a token is sampled: here attention forgets its soft cap."""
    directory = make_family(tmp_path / "gemma2", "gemma2", {**TRAINED["gemma2"], "attn_logit_softcapping": 0.05})
    import rlcore_torchkit.layers.packed_attention as module

    whole = module.Scores
    monkeypatch.setattr(module, "Scores", lambda softcap, **options: whole(**options))
    with pytest.raises(ModelError, match="log-probabilities"):
        tools.make_backend(directory)


def test_a_window_that_is_not_told_is_refused(tools, tmp_path, monkeypatch):
    """A trial of a few tokens would not see the window of a real model."""
    directory = make_family(tmp_path / "olmo3", "olmo3", {**TRAINED["olmo3"], "sliding_window": 64})
    import rlcore_torchkit.layers.packed_attention as module

    whole = module.Scores
    monkeypatch.setattr(module, "Scores", lambda window, **options: whole(**options))
    with pytest.raises(ModelError, match="tell their window"):
        tools.make_backend(directory)


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
