"""Log-probabilities over the tokens that sampling had kept, against a float64 softmax of these alone."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcore.spi import SamplingMask
from rlcore_torchkit.head.logprobs import token_logprobs
from rlcore_torchkit.head.sampling_mask import KeptTokens

CPU = torch.device("cpu")


def random_rows(targets: Tensor, vocabulary: int, seed: int) -> list[list[int]]:
    """A few tokens and the target for most rows, it alone for some, and nothing for others."""
    random, rows = np.random.default_rng(seed), []
    for target in targets.tolist():
        others = random.choice(vocabulary, random.integers(0, min(vocabulary, 6)), replace=False).tolist()
        rows.append(random.permutation([*{target, *others}]).tolist() if random.random() < 0.8 else [])
    return rows


def kept_of(rows: list[list[int]]) -> KeptTokens:
    return KeptTokens.of(SamplingMask.of([np.array(row, np.int32) for row in rows]), CPU)


def reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, rows: list[list[int]]
) -> tuple[Tensor, Tensor]:
    """Row by row, from the logits of the kept tokens and no others."""
    logprobs, entropies = [], []
    for state, target, row in zip(hidden, targets.tolist(), rows, strict=True):
        tokens = row or list(range(len(weight)))
        log_softmax = torch.log_softmax(weight[tokens] @ state / temperature, 0)
        logprobs.append(log_softmax[tokens.index(target)])
        entropies.append(-(log_softmax.exp() * log_softmax).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 20),
    vocabulary=st.integers(2, 40),
    chunk=st.sampled_from([None, 1, 3, 7]),
    temperature=st.sampled_from([1.0, 0.3, 2.5]),
    mode=st.sampled_from(["none", "metric", "loss"]),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_equal_float64(
    rows: int, vocabulary: int, chunk: int | None, temperature: float, mode: Any, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(rows, 5, generator=generator), torch.randn(vocabulary, 5, generator=generator)
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    exact = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    ours = [tensor.requires_grad_() for tensor in (hidden, weight)]
    kept = random_rows(targets, vocabulary, seed)
    options = {"temperature": temperature, "chunk_tokens": chunk, "entropy": mode}
    logprobs, entropy = token_logprobs(*ours, targets, kept=kept_of(kept), **options)
    expected, expected_entropy = reference(*exact, targets, temperature, kept)
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(2, rows, generator=generator) * (torch.arange(rows) % 3 > 0)
    loss, expected_loss = (logprobs * upstream[0]).sum(), (expected * upstream[0].double()).sum()
    if entropy is not None:
        torch.testing.assert_close(entropy.double(), expected_entropy, atol=1e-5, rtol=1e-5)
        if mode == "loss":
            loss, expected_loss = loss + (entropy * upstream[1]).sum(), expected_loss + (expected_entropy * upstream[1]).sum()
    loss.backward()
    expected_loss.backward()
    for found, wanted in zip(ours, exact, strict=True):
        torch.testing.assert_close(found.grad.double(), wanted.grad, atol=2e-4 / temperature, rtol=1e-4)


@pytest.mark.parametrize("chunk", [None, 2])
def test_gradcheck(chunk: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 3, generator=generator, dtype=torch.float64) for size in (5, 9))
    targets = torch.tensor([1, 8, 0, 4, 4])
    kept = kept_of([[1, 2], [8], [], [7, 4, 0], [0, 1, 2, 3, 4, 5, 6, 7, 8]])

    def function(hidden: Tensor, weight: Tensor) -> Any:
        return token_logprobs(hidden, weight, targets, temperature=0.7, chunk_tokens=chunk, entropy="loss", kept=kept)

    assert torch.autograd.gradcheck(function, (hidden.requires_grad_(), weight.requires_grad_()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_leave_nothing_over(dtype: torch.dtype) -> None:
    """A token that is kept alone has probability 1, and nothing else a gradient."""
    hidden, weight = torch.randn(4, 8).to(dtype), torch.randn(30, 8).to(dtype).requires_grad_()
    targets = torch.tensor([3, 9, 9, 29])
    logprobs, entropy = token_logprobs(
        hidden, weight, targets, temperature=0.1, entropy="loss", kept=kept_of([[3], [9], [9], [29]])
    )
    assert logprobs.tolist() == [0.0] * 4
    assert entropy is not None
    assert entropy.tolist() == [0.0] * 4
    (logprobs.sum() + entropy.sum()).backward()
    assert not weight.grad.any()


@given(st.lists(st.lists(st.integers(0, 9), max_size=4, unique=True), min_size=1, max_size=9), st.integers(1, 10), st.data())
def test_rows_chunks_and_parts_of_the_vocabulary(rows: list[list[int]], chunk: int, data: st.DataObject) -> None:
    def lists(kept: KeptTokens) -> list[list[int]]:
        return [part.tolist() for part in torch.split(kept.tokens, kept.lengths.tolist())]

    kept = kept_of(rows)
    order = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1))
    assert lists(kept.select(torch.tensor(order))) == [rows[row] for row in order]
    assert [row for part in kept.split(chunk) for row in lists(part)] == rows
    first = data.draw(st.integers(0, 9))
    part = kept.part(first, 10 - first)
    assert lists(part) == [[token - first for token in row if token >= first] for row in rows]
    assert part.masked.tolist() == [bool(row) for row in rows]
