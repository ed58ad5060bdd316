"""A model in bfloat16 is sampled from float32 logits, at any temperature, and the log-probabilities are theirs."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlcore.spi import (
    CloseRequest,
    GenerateRequest,
    GeneratorContext,
    ModelSpec,
    RaggedTokens,
    RankInfo,
    RefitRequest,
    SamplingParams,
)
from rlcore_conformance.references.tensors import make_export
from rlcore_torchkit.testing.models import make_model
from rlcore_vllm.backend import VllmBackend
from rlcore_vllm.setup.config import VllmConfig

PROMPTS = [[5], [9], [30]]
NUM_SAMPLES, NUM_TOKENS = 4, 24
SAMPLINGS = (
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.3, top_k=7),
    SamplingParams(temperature=0.0),
)


@pytest.fixture(scope="module")
def exact_model(tmp_path_factory):
    """A model whose hidden states are exact in bfloat16: embeddings of 1 and -1, to which no layer adds anything."""
    directory = make_model(
        tmp_path_factory.mktemp("float32-logits"), "llama", hidden_size=64, num_heads=2, tied=False, dtype="bfloat16"
    )
    tensors = load_file(directory / "model.safetensors")
    random = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor.zero_()
        elif "embed_tokens" in name:
            tensor.copy_(torch.randint(0, 2, tensor.shape, generator=random) * 2 - 1)
        elif "lm_head" in name:
            tensor.copy_(torch.randn(tensor.shape, generator=random) * 0.3)
        elif "norm" in name:
            tensor.fill_(1.0)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def expected_logprobs(tensors, inputs, tokens, sampling):
    """float64 [T] after each of `inputs`: of the distribution that is sampled from, by its definition."""
    embedding, head = tensors["model.embed_tokens.weight"].double(), tensors["lm_head.weight"].double()
    logits = embedding[inputs] @ head.T / (sampling.temperature or 1.0)
    if sampling.top_k:
        logits[logits < logits.topk(sampling.top_k).values[:, -1:]] = -torch.inf
    return logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0].numpy()


@pytest.mark.usefixtures("free_process")
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
        ),
    ],
)
def test_logprobs_are_those_of_float32_logits(exact_model, device):
    context = GeneratorContext(
        model=ModelSpec(path=str(exact_model), dtype="bfloat16"),
        rank_info=RankInfo(device=device),
        seed=0,
        max_sequence_length=64,
        channel="in_process",
    )
    tensors = load_file(exact_model / "model.safetensors")
    backend = VllmBackend(context, VllmConfig(cpu_kv_cache_gib=0.1, gpu_memory_utilization=0.1, max_num_seqs=64))
    try:
        weights = make_export({name: tensor.to(device) for name, tensor in tensors.items()}, 0)
        backend.refit(RefitRequest(weight_version=0, channel="in_process", weights=weights, may_alias=False))
        results = [backend.generate(request_of(sampling)) for sampling in SAMPLINGS]
    finally:
        backend.close(CloseRequest())
    for sampling, result in zip(SAMPLINGS, results, strict=True):
        inputs = torch.tensor(result.tokens).long().roll(1)
        inputs[::NUM_TOKENS] = torch.tensor(PROMPTS).repeat_interleave(NUM_SAMPLES)
        expected = expected_logprobs(tensors, inputs, torch.tensor(result.tokens).long(), sampling)
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4, err_msg=str(sampling))
        assert sampling.temperature == 0.0 or len(set(result.tokens.tolist())) > 10


def request_of(sampling):
    num = len(PROMPTS) * NUM_SAMPLES
    return GenerateRequest(
        prompts=RaggedTokens.from_lists(PROMPTS),
        num_samples=NUM_SAMPLES,
        seeds=np.arange(num),
        max_tokens=np.full(num, NUM_TOKENS, np.int32),
        sampling=sampling,
        weight_version=0,
    )
