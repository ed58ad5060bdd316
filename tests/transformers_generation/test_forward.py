"""Tokens and log-probabilities against transformers' own modules and float64 numpy."""

import numpy as np
import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from rlcore.spi import ModelError, ModelSpec
from rlcore_torchkit.huggingface.models import load_config
from rlcore_transformers.forward import FamilyDecoder

VARIANTS = {
    "llama with biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with llama3 positions": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "qwen2 with yarn positions": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "one key-value head": ("qwen3", {"num_key_value_heads": 1}),
    "no grouped heads, wide heads": ("qwen3", {"num_key_value_heads": 4, "head_dim": 16}),
    "experts in every other layer, weights not renormalised": (
        "qwen3_moe",
        {"decoder_sparse_step": 2, "norm_topk_prob": False},
    ),
}


def reference_distribution(logits, temperature=1.0, top_k=0, top_p=1.0):
    """float64 [V] probabilities of the distribution that sampling parameters mean, the slow way."""
    scaled = logits / temperature
    order = np.argsort(-scaled)
    kept = order[:top_k] if top_k else order
    probabilities = np.exp(scaled[kept] - scaled[kept].max())
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities) - probabilities
    kept, probabilities = kept[before < top_p], probabilities[before < top_p]
    full = np.zeros(len(logits))
    full[kept] = probabilities / probabilities.sum()
    return full


def check_logprobs(tools, directory, prompts, result, num_samples, **sampling):
    """Every sampled token's log-probability against the reference distribution; returns the largest difference."""
    worst = 0.0
    samples, logprobs = tools.split(result), tools.split(result, "logprobs")
    for number, (response, found) in enumerate(zip(samples, logprobs, strict=True)):
        prompt = prompts[number // num_samples]
        logits = tools.reference_logits(directory, [*prompt, *response])[len(prompt) - 1 : -1]
        for row, token, logprob in zip(logits, response, found, strict=True):
            probability = reference_distribution(row, **sampling)[token]
            assert probability > 0.0
            worst = max(worst, abs(np.log(probability) - logprob))
    return worst


def test_greedy_equals_transformers_generate(tools, any_checkpoint):
    prompts = tools.random_prompts([3, 9, 6], seed=1)
    result = tools.make_backend(any_checkpoint).generate(tools.make_request(prompts, max_tokens=20, temperature=0.0))
    model = tools.reference_model(any_checkpoint)
    for prompt, response in zip(prompts, tools.split(result), strict=True):
        inputs = torch.tensor([prompt])
        expected = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert response == expected[0, len(prompt) :].tolist()


def test_greedy_logprobs_are_untempered_and_untruncated(tools, qwen3, qwen3_backend):
    prompts = tools.random_prompts([4, 7], seed=2)
    result = qwen3_backend.generate(tools.make_request(prompts, temperature=0.0, top_k=2, top_p=0.5))
    for prompt, response, logprobs in zip(prompts, tools.split(result), tools.split(result, "logprobs"), strict=True):
        logits = tools.reference_logits(qwen3, [*prompt, *response])[len(prompt) - 1 : -1]
        assert response == logits.argmax(-1).tolist()
        np.testing.assert_allclose(logprobs, tools.log_softmax(logits).max(-1), atol=1e-5)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 5},
        {"top_p": 0.7},
        {"temperature": 0.8, "top_k": 8, "top_p": 0.8},
        {"top_k": 1},
        {"top_p": 1e-6},
    ],
    ids=str,
)
def test_logprobs_are_of_the_distribution_sampled_from(tools, qwen3, qwen3_backend, sampling):
    prompts = tools.random_prompts([2, 11, 5], seed=3)
    result = qwen3_backend.generate(tools.make_request(prompts, num_samples=3, max_tokens=16, **sampling))
    assert check_logprobs(tools, qwen3, prompts, result, 3, **sampling) < 1e-5


def test_logprobs_for_every_architecture(tools, any_checkpoint):
    prompts = tools.random_prompts([2, 13, 5], seed=4)
    backend = tools.make_backend(any_checkpoint, max_batch_size=4)
    result = backend.generate(tools.make_request(prompts, num_samples=4, max_tokens=24, temperature=0.9))
    assert check_logprobs(tools, any_checkpoint, prompts, result, 4, temperature=0.9) < 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
def test_logprobs_for_variants_of_the_architectures(tools, checkpoint, variant):
    architecture, options = VARIANTS[variant]
    directory = checkpoint(architecture, tied=False, **options)
    prompts = tools.random_prompts([40, 3], seed=5)
    result = tools.make_backend(directory).generate(tools.make_request(prompts, num_samples=2, max_tokens=20))
    assert check_logprobs(tools, directory, prompts, result, 2) < 1e-5


def test_bfloat16_logprobs_stay_near_those_of_float32(tools, qwen3):
    prompts = tools.random_prompts([6, 3], seed=6)
    backend = tools.make_backend(qwen3, dtype="bfloat16")
    result = backend.generate(tools.make_request(prompts, num_samples=8, max_tokens=16))
    differences = []
    for number, (response, found) in enumerate(zip(tools.split(result), tools.split(result, "logprobs"), strict=True)):
        prompt = prompts[number // 8]
        logits = tools.reference_logits(qwen3, [*prompt, *response])[len(prompt) - 1 : -1]
        differences += (tools.log_softmax(logits)[range(len(response)), response] - found).tolist()
    assert np.abs(differences).mean() < 0.05
    assert np.abs(differences).max() < 0.5


def test_tensors_that_the_forward_pass_lacks_are_refused(tools, qwen3):
    config = load_config(ModelSpec(path=str(qwen3)))
    decoder = FamilyDecoder(config, Qwen3RotaryEmbedding(config), 8, torch.float32, torch.device("cpu"))
    with pytest.raises(ModelError) as raised:
        decoder.bind({**tools.checkpoint_tensors(qwen3), "model.layers.0.self_attn.sinks": torch.zeros(4)})
    assert [problem.path for problem in raised.value.problems] == ["model.layers.0.self_attn.sinks"]
