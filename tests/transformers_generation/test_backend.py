"""Provider, residency, broken weights, and a CUDA device."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from rlcore.spi import (
    CloseRequest,
    NonFiniteError,
    SetResidencyRequest,
    capabilities,
)
from rlcore_transformers import provider

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ON_CUDA = pytest.param("cuda", marks=gpu)


def place(backend, weights, state):
    return backend.set_residency(SetResidencyRequest(weights=weights, state=state)).device_bytes


def test_the_entry_point_imports_nothing_heavy():
    code = (
        "import sys, rlcore_transformers.provider, rlcore_transformers.check; "
        "print(sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_provider_declares_known_capabilities():
    assert all(map(capabilities.is_known, provider.PROVIDER.capabilities))
    assert provider.PROVIDER.unavailable() is None


def test_weights_that_are_not_finite_are_named_and_leave_no_trace(tools, qwen3):
    """What a broken run leaves in the cache would reach a short sequence beside a long one, through a weight of zero."""
    backend = tools.make_backend(qwen3, max_prefill_tokens=1)
    tensors = tools.checkpoint_tensors(qwen3)
    prompts = [[2, 3, 4], [5] * 60]
    before = backend.generate(tools.make_request(prompts)).tokens.tolist()
    broken = {name: tensor.clone() for name, tensor in tensors.items()}
    broken["model.layers.1.self_attn.v_proj.weight"][0, 0] = torch.nan
    tools.refit(backend, tools.make_export(broken, version=1))
    with pytest.raises(NonFiniteError, match="sample 0"):
        backend.generate(tools.make_request([prompts[1]], num_samples=2, version=1))
    tools.refit(backend, tools.make_export(tensors, version=2))
    assert backend.generate(tools.make_request(prompts, version=2)).tokens.tolist() == before


@pytest.mark.parametrize("may_alias", [False, True])
@pytest.mark.parametrize("device", ["cpu", ON_CUDA])
def test_residency_is_measured_and_restored(tools, qwen3, device, may_alias):
    backend = tools.make_backend(qwen3, device=device, fill=False)
    tensors = {name: tensor.to(device) for name, tensor in tools.checkpoint_tensors(qwen3).items()}
    weight_bytes = sum(tensor.nbytes for tensor in tensors.values())
    assert place(backend, "device", "device") == 0
    tools.refit(backend, tools.make_export(tensors, persistent=True), may_alias=may_alias)
    expected = backend.generate(tools.make_request([[2, 3]], num_samples=4)).tokens.tolist()
    assert place(backend, "device", "device") > weight_bytes
    assert place(backend, "device", "host") == weight_bytes
    assert place(backend, "host", "host") == (weight_bytes if device == "cpu" else 0)
    assert place(backend, "device", "device") == weight_bytes
    assert backend.generate(tools.make_request([[2, 3]], num_samples=4)).tokens.tolist() == expected
    for name, tensor in tools.checkpoint_tensors(qwen3).items():
        assert torch.equal(tensors[name].cpu(), tensor)


def test_close_lets_go_of_everything(tools, qwen3):
    backend = tools.make_backend(qwen3)
    backend.generate(tools.make_request([[2]]))
    assert place(backend, "device", "device") > 0
    backend.close(CloseRequest())
    assert place(backend, "device", "device") == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_cuda_logprobs_match_float32_on_cpu(tools, any_checkpoint, dtype, tolerance):
    prompts = tools.random_prompts([6, 30, 3], seed=12)
    backend = tools.make_backend(any_checkpoint, dtype=dtype, device="cuda", max_batch_size=7)
    result = backend.generate(tools.make_request(prompts, num_samples=8, max_tokens=24, temperature=0.8))
    differences = []
    for number, (response, found) in enumerate(zip(tools.split(result), tools.split(result, "logprobs"), strict=True)):
        prompt = prompts[number // 8]
        logits = tools.reference_logits(any_checkpoint, [*prompt, *response])[len(prompt) - 1 : -1] / 0.8
        differences.append(np.abs(tools.log_softmax(logits)[range(len(response)), response] - found).mean())
    assert np.mean(differences) < tolerance


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_samples_equal_those_on_cpu(tools, qwen3, qwen3_backend):
    """In float32 the noise is the same on every device, so only a near-tie could differ."""
    prompts = tools.random_prompts([6, 30, 3], seed=13)
    request = tools.make_request(prompts, num_samples=4, max_tokens=24, top_p=0.95)
    on_cuda = tools.make_backend(qwen3, device="cuda").generate(request)
    assert tools.split(on_cuda) == tools.split(qwen3_backend.generate(request))
