"""Prompts with images: what an engine makes of them, against transformers' forward with the same images, after refits."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "fsdp2_backend"))

from image_support import ImageReference, image_batch

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
from rlcore_torchkit.testing.image_models import make_image_model
from rlcore_vllm.engines.image_features import one_placeholder_each
from rlcore_vllm.setup.config import VllmConfig

PAD = 9


@pytest.mark.parametrize(
    ("prompt", "num_images", "shown"),
    [
        ([1, PAD, PAD, 2, PAD, 3], 2, [1, PAD, 2, PAD, 3]),
        ([PAD, PAD, 2, PAD, PAD], 1, [PAD, 2, PAD, PAD]),  # the last two were said
        ([1, 2], 0, [1, 2]),
    ],
)
def test_one_placeholder_stands_for_each_image(prompt, num_images, shown):
    assert one_placeholder_each(prompt, PAD, num_images) == shown


@pytest.mark.wide(keep=["qwen3_vl-cpu", "qwen3_vl-cuda"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_samples_and_refits_of_models_of_images(family, device, tmp_path, free_process):
    pytest.importorskip("vllm")
    pytest.importorskip("torchvision", reason="vLLM reads images with it")
    from rlcore_vllm.backend import VllmBackend

    directories = [make_image_model(tmp_path / str(seed), family, seed=seed) for seed in range(2)]
    context = GeneratorContext(
        model=ModelSpec(path=str(directories[0])), rank_info=RankInfo(device=device), seed=0, max_sequence_length=128
    )
    config = VllmConfig(cpu_kv_cache_gib=0.1, max_num_seqs=8, gpu_memory_utilization=0.2, refit_timeout_s=600.0)
    backend = VllmBackend(context, config)
    batch = image_batch(directories[0], 0)
    prompts = [batch.tokens[batch.offsets[n] : batch.offsets[n + 1]] for n in range(4)]
    for version, directory in enumerate(directories):
        tensors = load_file(directory / "model.safetensors")
        weights = make_export({name: tensor.to(device) for name, tensor in tensors.items()}, version)
        refit = RefitRequest(weight_version=version, channel="in_process", weights=weights, may_alias=False)
        digests = backend.refit(refit).digests
        assert any("visual" in name for name in digests)
        request = GenerateRequest(
            prompts=RaggedTokens.from_lists([prompt.tolist() for prompt in prompts]),
            num_samples=2,
            seeds=np.arange(8),
            max_tokens=np.full(8, 6, np.int32),
            sampling=SamplingParams(),
            weight_version=version,
            images=batch.images[:4],
        )
        result = backend.generate(request)
        own, other = (greatest_error(one, result, prompts, batch.images) for one in (directory, directories[1 - version]))
        assert own < (1e-4 if device == "cpu" else 1e-3)
        assert other > 0.1
    backend.close(CloseRequest())


def greatest_error(directory, result, prompts, images):
    """Of the log-probabilities of the samples, against transformers on each sequence; those that say a placeholder, which
    transformers takes for an image, aside."""
    reference, errors = ImageReference(directory), []
    for number in range(len(result.finish_reasons)):
        said = slice(result.offsets[number], result.offsets[number + 1])
        tokens = result.tokens[said]
        if reference.model.config.image_token_id in tokens:
            continue
        whole = torch.from_numpy(np.concatenate([prompts[number // 2], tokens])).long()
        with torch.no_grad():
            logits = reference.logits(whole, images[number // 2])
        logprobs = logits[:-1].log_softmax(-1).gather(1, whole[1:, None])[-len(tokens) :, 0]
        errors.append(np.abs(logprobs.numpy() - result.logprobs[said]).max())
    assert len(errors) > 3
    return max(errors)
