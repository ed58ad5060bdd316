"""Softmax in Triton against float64: by Triton's interpreter without a GPU, and by its compiler on one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

Computed = dict[str, Tensor]
ROWS, COLUMNS, TEMPERATURE = 6, 4100, 0.7
"""More columns than a block of either kernel has."""
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """float32 logits, the targets, and the upstream gradients of log-probabilities and entropies.

    Row 1 is -inf in its whole first block, as truncated sampling may leave it; a stride separates the rows.
    """
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(ROWS, COLUMNS + 20, generator=generator)[:, :COLUMNS]
    targets = torch.randint(COLUMNS, (ROWS,), generator=generator)
    logits[1, :4096], targets[1] = -torch.inf, 4097
    upstream = torch.randn(2, ROWS, generator=generator)
    upstream[:, 2] = 0.0
    return logits, targets, upstream


def computed(device: str) -> Computed:
    from rlcore_torchkit.head.softmax_kernels import gradient_, normalise

    logits, targets, upstream = (tensor.to(device) for tensor in inputs())
    logprobs, logsumexps, entropies, alone, again = torch.empty(5, ROWS, device=device)
    normalise(logits, targets, TEMPERATURE, logprobs, logsumexps, entropies)
    normalise(logits, targets, TEMPERATURE, alone, again, None)
    finite = torch.arange(ROWS) != 1
    kept, targets, logsumexps, entropies = logits[finite].contiguous(), targets[finite], logsumexps[finite], entropies[finite]
    by_logprobs, by_entropy = -upstream[:, finite] / TEMPERATURE
    plain = gradient_(kept.clone(), logsumexps, targets, TEMPERATURE, by_logprobs.contiguous())
    shift = by_logprobs + by_entropy * entropies
    both = gradient_(kept.clone(), logsumexps, targets, TEMPERATURE, by_logprobs.contiguous(), by_entropy.contiguous(), shift)
    found = {"logprobs": logprobs, "alone": alone, "plain": plain, "both": both}
    return {name: tensor.cpu() for name, tensor in (found | {"entropies": entropies}).items()}


@pytest.fixture(
    params=["interpreter", pytest.param("cuda", marks=[pytest.mark.gpu, on_gpu])],
    scope="module",
)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Computed:
    pytest.importorskip("triton")
    if request.param == "cuda":
        return computed("cuda")
    file = tmp_path_factory.mktemp("softmax") / "found.pt"
    # Triton decides when it is imported.
    subprocess.run([sys.executable, __file__, file], env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)
    return torch.load(file)


def exact() -> tuple[Tensor, Tensor, Tensor]:
    """float64 leaf of logits, and the log-probabilities and entropies of the targets."""
    logits, targets, _ = inputs()
    leaf = logits.double().requires_grad_()
    log_softmax = torch.log_softmax(leaf / TEMPERATURE, 1)
    probabilities = log_softmax.exp()
    entropies = -torch.where(probabilities > 0, probabilities * log_softmax, 0.0).sum(1)
    return leaf, log_softmax.gather(1, targets[:, None])[:, 0], entropies


def test_log_probabilities_and_entropies_equal_float64(found: Computed) -> None:
    _, logprobs, entropies = exact()
    torch.testing.assert_close(found["logprobs"].double(), logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found["alone"], found["logprobs"], atol=0.0, rtol=0.0)
    torch.testing.assert_close(found["entropies"].double(), entropies[torch.arange(ROWS) != 1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["plain", "both"])
def test_gradients_equal_those_of_float64(name: str, found: Computed) -> None:
    leaf, logprobs, entropies = exact()
    upstream, finite = inputs()[2].double(), torch.arange(ROWS) != 1
    loss = (logprobs * upstream[0])[finite].sum()
    if name == "both":
        loss = loss + (entropies * upstream[1])[finite].sum()
    (expected,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(found[name].double(), expected[finite], atol=2e-6, rtol=1e-4)


if __name__ == "__main__":
    torch.save(computed("cpu"), Path(sys.argv[1]))
