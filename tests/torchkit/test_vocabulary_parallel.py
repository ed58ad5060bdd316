"""Log-probabilities with the head's rows on several ranks, against the formula in float64 on all of them."""

import json
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.spi import ContractError, SamplingMask
from rlcore_torchkit.head.sampling_mask import KeptTokens
from rlcore_torchkit.head.vocabulary_parallel import vocabulary_parallel_logprobs
from rlcore_torchkit.testing.ranks import launch

from .largest_tensor import LargestTensor

NUM_RANKS = 2
NUM_ROWS, NUM_COLUMNS, WIDTH = 37, 50, 12
SHARES = {"even": (25, 25), "uneven": (33, 17)}
"""Rows of the head on each rank."""
CASES: list[tuple[str, Any, float, int | None, bool, float | None]] = [
    (share, entropy, temperature, chunk, False, None)
    for share in SHARES
    for entropy, temperature, chunk in (("none", 1.0, None), ("metric", 0.7, 5), ("loss", 1.3, 8), ("loss", 1.0, None))
]
CASES += [
    ("uneven", "none", 1.0, 5, True, None),
    ("uneven", "loss", 1.3, 8, True, None),
    ("even", "metric", 0.7, None, True, None),
    ("even", "loss", 1.0, 8, False, 1.5),
    ("uneven", "none", 0.7, None, False, 1.5),
    ("uneven", "loss", 1.3, 8, True, 1.5),
]
"""The last but one says whether only a few tokens are kept, some of them on one rank alone; the last is a soft cap."""


def reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, left_out: Tensor, cap: float | None
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    log_softmax = torch.log_softmax((logits / temperature).masked_fill(left_out, -1e12), 1)
    return log_softmax.gather(1, targets[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(1)


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(NUM_ROWS, WIDTH, generator=generator), torch.randn(NUM_COLUMNS, WIDTH, generator=generator) / 3
    targets = torch.randint(NUM_COLUMNS, (NUM_ROWS,), generator=generator)
    upstream = torch.randn(2, NUM_ROWS, generator=generator)
    upstream[:, ::4] = 0.0  # rows that no gradient reaches
    return hidden, weight, targets, upstream


def kept_tokens(targets: Tensor) -> list[list[int]]:
    """The target and up to four more; for every fifth row all tokens."""
    random = np.random.default_rng(3)
    others = [random.choice(NUM_COLUMNS, row % 5, replace=False).tolist() for row in range(NUM_ROWS)]
    return [[] if row % 5 == 4 else [*{target, *others[row]}] for row, target in enumerate(targets.tolist())]


def check(rank: int, share: str, entropy: Any, temperature: float, chunk: int | None, masked: bool, cap: float | None) -> None:
    hidden, weight, targets, upstream = inputs()
    left_out, kept = torch.zeros(NUM_ROWS, NUM_COLUMNS, dtype=torch.bool), kept_tokens(targets)
    for row, tokens in enumerate(kept if masked else []):
        left_out[row] = bool(tokens)
        left_out[row, tokens] = False
    mask = KeptTokens.of(SamplingMask.of([np.array(row, np.int32) for row in kept]), hidden.device) if masked else None
    first = sum(SHARES[share][:rank])
    exact = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    ours = [hidden.requires_grad_(), weight[first : first + SHARES[share][rank]].clone().requires_grad_()]
    options = {"first": first, "group": dist.group.WORLD, "temperature": temperature, "chunk_tokens": chunk, "entropy": entropy}
    logprobs, entropies = vocabulary_parallel_logprobs(*ours, targets, kept=mask, cap=cap, **options)
    expected, expected_entropies = reference(*exact, targets, temperature, left_out, cap)
    assert logprobs.dtype == torch.float32
    assert (logprobs - expected).abs().max() < 1e-6
    loss, expected_loss = (logprobs * upstream[0]).sum(), (expected * upstream[0]).sum()
    if entropies is not None:
        assert (entropies - expected_entropies).abs().max() < 1e-6
    assert (entropies is None) == (entropy == "none")
    if entropy == "loss":
        loss = loss + (entropies * upstream[1]).sum()
        expected_loss = expected_loss + (expected_entropies * upstream[1]).sum()
    loss.backward()
    expected_loss.backward()
    dist.all_reduce(ours[0].grad)
    assert (ours[0].grad - exact[0].grad).abs().max() < 1e-6
    assert (ours[1].grad - exact[1].grad[first : first + len(ours[1])]).abs().max() < 2e-6


def check_largest(rank: int) -> None:
    """No tensor of all rows and this rank's columns, in the forward or the backward pass."""
    hidden, weight = torch.randn(512, 8, requires_grad=True), torch.randn(600, 8)
    targets = torch.randint(1200, (512,), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"first": 600 * rank, "group": dist.group.WORLD, "chunk_tokens": 16, "entropy": "loss"}
    with LargestTensor() as largest:
        logprobs, entropies = vocabulary_parallel_logprobs(hidden, weight, targets, temperature=0.5, **options)
        assert entropies is not None
        (logprobs.sum() + entropies.sum()).backward()
    assert largest.numel == 16 * 600


def run(rank: int, root: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=NUM_RANKS)
    results = []
    for case in CASES:
        results.append("")
        try:
            check(rank, *case)
        except AssertionError:
            results[-1] = traceback.format_exc()
    try:
        check_largest(rank)
        results.append("")
    except AssertionError:
        results.append(traceback.format_exc())
    (root / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    root = tmp_path_factory.mktemp("parallel")
    launch(run, (root,), NUM_RANKS)
    return [json.loads((root / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("index", range(len(CASES)), ids=["-".join(map(str, case)) for case in CASES])
def test_two_ranks_equal_the_whole_head_in_float64(index: int, results: list[list[str]]) -> None:
    assert [result[index] for result in results] == ["", ""]


def test_no_tensor_of_the_whole_microbatch(results: list[list[str]]) -> None:
    assert [result[-1] for result in results] == ["", ""]


@pytest.mark.parametrize(("temperature", "message"), [(0.0, "temperature 0"), (1.0, r"targets \[36\]")])
def test_wrong_input_is_refused(temperature: float, message: str) -> None:
    hidden, weight, targets, _ = inputs()
    targets = targets if temperature == 0.0 else targets[:-1]
    with pytest.raises(ContractError, match=message):
        vocabulary_parallel_logprobs(hidden, weight, targets, first=0, group=None, temperature=temperature)  # type: ignore[arg-type]
