"""Log-probabilities and entropy against a float64 log-softmax of the full logits."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcore.spi import ContractError
from rlcore_torchkit.head.logprobs import head_in_float32, packed_logprobs, patch_head, token_logprobs
from rlcore_torchkit.layers.attention import PackedSequences

from .largest_tensor import LargestTensor

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def inputs(rows: int, vocabulary: int, width: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator).to(dtype)
    weight = torch.randn(vocabulary, width, generator=generator).to(dtype)
    return hidden, weight, torch.randint(vocabulary, (rows,), generator=generator)


def reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """The definition, in whatever dtype the inputs are."""
    logits = hidden @ weight.T
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    log_softmax = torch.log_softmax(logits / temperature, 1)
    return log_softmax.gather(1, targets[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(1)


cases = given(
    rows=st.integers(1, 40),
    vocabulary=st.integers(2, 70),
    width=st.integers(1, 12),
    chunk=st.sampled_from([None, 1, 3, 7, 64]),
    temperature=st.sampled_from([1.0, 0.3, 0.7, 2.5]),
    mode=st.sampled_from(["none", "metric", "loss"]),
    cap=st.sampled_from([None, 2.0, 30.0]),
    seed=st.integers(0, 1000),
)


@settings(max_examples=150, deadline=None)
@cases
def test_values_and_gradients_equal_float64(
    rows: int, vocabulary: int, width: int, chunk: int | None, temperature: float, mode: Any, cap: float | None, seed: int
) -> None:
    hidden, weight, targets = inputs(rows, vocabulary, width, seed)
    exact_hidden, exact_weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    hidden.requires_grad_()
    weight.requires_grad_()
    options: dict[str, Any] = {"temperature": temperature, "chunk_tokens": chunk, "entropy": mode, "cap": cap}
    logprobs, entropy = token_logprobs(hidden, weight, targets, **options)
    expected, expected_entropy = reference(exact_hidden, exact_weight, targets, temperature, cap)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=1e-5)
    assert (entropy is None) == (mode == "none")
    upstream = torch.randn(2, rows, generator=torch.Generator().manual_seed(seed)) * (torch.arange(rows) % 3 > 0)
    loss, expected_loss = (logprobs * upstream[0]).sum(), (expected * upstream[0].double()).sum()
    if entropy is not None:
        torch.testing.assert_close(entropy.double(), expected_entropy, atol=1e-5, rtol=1e-5)
        assert entropy.requires_grad == (mode == "loss")
        if mode == "loss":
            loss, expected_loss = loss + (entropy * upstream[1]).sum(), expected_loss + (expected_entropy * upstream[1]).sum()
    loss.backward()
    expected_loss.backward()
    torch.testing.assert_close(hidden.grad.double(), exact_hidden.grad, atol=2e-4 / temperature, rtol=1e-4)
    torch.testing.assert_close(weight.grad.double(), exact_weight.grad, atol=2e-4 / temperature, rtol=1e-4)


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("cap", [None, 1.5])
def test_gradcheck(chunk: int | None, temperature: float, cap: float | None) -> None:
    hidden, weight, targets = inputs(5, 7, 3, 0, torch.float64)

    def function(hidden: Tensor, weight: Tensor) -> Any:
        options: dict[str, Any] = {"temperature": temperature, "chunk_tokens": chunk, "entropy": "loss", "cap": cap}
        return token_logprobs(hidden, weight, targets, **options)

    assert torch.autograd.gradcheck(function, (hidden.requires_grad_(), weight.requires_grad_()))


@pytest.mark.parametrize("chunk", [None, 4])
def test_only_what_is_asked_for_gets_a_gradient(chunk: int | None) -> None:
    hidden, weight, targets = inputs(9, 11, 4, 0)
    token_logprobs(hidden, weight.requires_grad_(), targets, temperature=1.0, chunk_tokens=chunk)[0].sum().backward()
    assert weight.grad is not None
    with torch.no_grad():
        assert not token_logprobs(hidden, weight, targets, temperature=1.0)[0].requires_grad
    # The entropy alone in the loss, and a loss that nothing reaches.
    hidden.requires_grad_()
    token_logprobs(hidden, weight, targets, temperature=1.0, chunk_tokens=chunk, entropy="loss")[1].sum().backward()
    exact_hidden = hidden.detach().double().requires_grad_()
    reference(exact_hidden, weight.detach().double(), targets, 1.0)[1].sum().backward()
    torch.testing.assert_close(hidden.grad.double(), exact_hidden.grad, atol=1e-5, rtol=1e-4)
    hidden.grad = weight.grad = None
    (token_logprobs(hidden, weight, targets, temperature=1.0, chunk_tokens=chunk)[0] * 0.0).sum().backward()
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_the_head_in_float32_takes_no_product_in_bfloat16() -> None:
    hidden, weight, targets = inputs(30, 50, 12, seed=1, dtype=torch.bfloat16)
    expected = reference(hidden.double(), weight.double(), targets, 1.0)[0]
    narrow = token_logprobs(hidden, weight, targets, temperature=1.0)[0]
    with head_in_float32():
        wide = token_logprobs(hidden, weight, targets, temperature=1.0)[0]
    after = token_logprobs(hidden, weight, targets, temperature=1.0)[0]
    torch.testing.assert_close(wide.double(), expected, atol=1e-5, rtol=0)
    assert (narrow.double() - expected).abs().max() > 1e-3
    assert torch.equal(narrow, after)


def test_bfloat16_product_then_float32_softmax() -> None:
    """The rounding of samplers: logits in the compute dtype, then divided and normalised in float32."""
    hidden, weight, targets = inputs(30, 50, 16, 0, torch.bfloat16)
    sampler = torch.log_softmax((hidden @ weight.T).float() / 0.7, 1).gather(1, targets[:, None])[:, 0]
    logprobs, _ = token_logprobs(hidden, weight, targets, temperature=0.7, chunk_tokens=8)
    torch.testing.assert_close(logprobs, sampler, atol=1e-6, rtol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        master = weight.float().requires_grad_()
        under_autocast, _ = token_logprobs(hidden.float(), master, targets, temperature=0.7)
    torch.testing.assert_close(under_autocast, sampler, atol=1e-6, rtol=1e-6)
    under_autocast.sum().backward()
    assert master.grad.dtype == torch.float32


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, on_gpu])])
def test_the_weight_gradient_is_accumulated_in_float32(device: str) -> None:
    """Many chunks that each add little to a large sum: bfloat16 accumulation would lose them."""
    rows, width = 4096, 8
    hidden = torch.ones(rows, width, dtype=torch.bfloat16, device=device)
    weight = torch.zeros(4, width, dtype=torch.bfloat16, device=device, requires_grad=True)
    targets = torch.zeros(rows, dtype=torch.int64, device=device)
    token_logprobs(hidden, weight, targets, temperature=1.0, chunk_tokens=4)[0].sum().backward()
    torch.testing.assert_close(weight.grad[0].float(), torch.full((width,), 0.75 * rows, device=device))


def test_no_tensor_of_the_whole_microbatch() -> None:
    hidden, weight, targets = inputs(512, 600, 8, 0)
    hidden.requires_grad_()
    with LargestTensor() as largest:
        logprobs, entropy = token_logprobs(hidden, weight, targets, temperature=0.5, chunk_tokens=16, entropy="loss")
        (logprobs.sum() + entropy.sum()).backward()
    assert largest.numel == 16 * 600


def test_wrong_input_is_refused() -> None:
    hidden, weight, targets = inputs(4, 5, 3, 0)
    with pytest.raises(ContractError, match=r"targets \[3\]"):
        token_logprobs(hidden, weight, targets[:3], temperature=1.0)
    with pytest.raises(ContractError, match="temperature 0"):
        token_logprobs(hidden, weight, targets, temperature=0.0)
    with pytest.raises(ContractError, match="bias"):
        patch_head(HeadWithBias())


class HeadWithBias(torch.nn.Module):
    def get_output_embeddings(self) -> torch.nn.Module:
        return torch.nn.Linear(2, 3)


def plain_packed(model: Any, tokens: Tensor, offsets: np.ndarray, temperature: float) -> tuple[Tensor, Tensor]:
    """Aligned log-probabilities and entropy [T] from transformers, one sequence at a time."""
    logprobs, entropies = [], []
    for start, end in itertools.pairwise(offsets):
        ids = tokens[start:end].long()
        hidden = model.base_model(ids[None]).last_hidden_state[0, :-1]
        values, entropy = reference(hidden, model.lm_head.weight, ids[1:], temperature)
        logprobs.append(torch.cat([values.new_zeros(1), values]))
        entropies.append(torch.cat([values.new_zeros(1), entropy]))
    return torch.cat(logprobs), torch.cat(entropies)


def test_packed_logprobs_equal_plain_transformers(
    architecture: str, packed_model: Callable, plain_model: Callable, pack: Callable
) -> None:
    tokens, offsets = pack([5, 17, 1, 30, 2])
    plain, ours = plain_model(architecture), copy.deepcopy(packed_model(architecture))
    names = [name for name, _ in ours.named_parameters()]
    patch_head(ours)
    assert [name for name, _ in ours.named_parameters()] == names
    packed = PackedSequences.from_offsets(offsets, "cpu")
    logprobs, entropy = packed_logprobs(ours, tokens, packed, temperature=0.8, entropy="loss")
    expected, expected_entropy = plain_packed(plain, tokens, offsets, 0.8)
    assert (logprobs - expected).abs().max() < 1e-5
    assert (entropy - expected_entropy).abs().max() < 1e-5
    assert (logprobs[offsets[:-1]] == 0).all()
    upstream = torch.randn(2, len(tokens), generator=torch.Generator().manual_seed(0)) / len(tokens)
    (logprobs * upstream[0] + entropy * upstream[1]).sum().backward()
    (expected * upstream[0] + expected_entropy * upstream[1]).sum().backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, atol=1e-5, rtol=1e-4)


def test_a_pack_of_first_tokens_only(packed_model: Callable, pack: Callable) -> None:
    model = copy.deepcopy(packed_model("llama"))
    patch_head(model)
    tokens, offsets = pack([1, 1])
    packed = PackedSequences.from_offsets(offsets, "cpu")
    logprobs, entropy = packed_logprobs(model, tokens, packed, temperature=1.0, entropy="metric")
    assert logprobs.tolist() == entropy.tolist() == [0.0, 0.0]
    logprobs.sum().backward()
    assert not model.lm_head.weight.grad.any()


def test_a_copy_of_a_patched_model_uses_its_own_weights(packed_model: Callable, pack: Callable) -> None:
    model = copy.deepcopy(packed_model("qwen2"))
    patch_head(model)
    reference_model = copy.deepcopy(model)
    tokens, offsets = pack([8])
    packed = PackedSequences.from_offsets(offsets, "cpu")
    before, _ = packed_logprobs(reference_model, tokens, packed, temperature=1.0)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(2.0)
    assert torch.equal(packed_logprobs(reference_model, tokens, packed, temperature=1.0)[0], before)
    assert not torch.equal(packed_logprobs(model, tokens, packed, temperature=1.0)[0], before)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("mode", ["none", "metric", "loss"])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_bfloat16_on_cuda_equals_float64(mode: Any, cap: float | None) -> None:
    hidden, weight, targets = inputs(300, 1000, 64, 0, torch.bfloat16)
    hidden, weight = hidden * 0.2, weight
    exact = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    ours = [tensor.cuda().requires_grad_() for tensor in (hidden, weight)]
    logprobs, entropy = token_logprobs(*ours, targets.cuda(), temperature=0.9, chunk_tokens=64, entropy=mode, cap=cap)
    expected, expected_entropy = reference(*exact, targets, 0.9, cap)
    assert (logprobs.double().cpu() - expected).abs().max() < 0.05
    loss, expected_loss = logprobs.sum(), expected.sum()
    if mode != "none":
        assert (entropy.double().cpu() - expected_entropy).abs().max() < 0.05
    if mode == "loss":
        loss, expected_loss = loss + entropy.sum(), expected_loss + expected_entropy.sum()
    loss.backward()
    expected_loss.backward()
    for found, reference_tensor in zip(ours, exact, strict=True):
        error = found.grad.double().cpu() - reference_tensor.grad
        assert error.norm() < 0.02 * reference_tensor.grad.norm()
