"""Softmax over a vocabulary in one pass each way, as Triton kernels for CUDA.

Forward and backward read a row of logits once, in their own dtype, where torch's operations read and write float32 copies of
it several times: at a vocabulary of 150,000 that is most of what the head costs beyond its matrix products.

Shapes: C rows of a chunk, V vocabulary. A row's scaled logits are z = logits / temperature.
"""

import triton
import triton.language as tl
from torch import Tensor

FORWARD_BLOCK = 4096
BACKWARD_BLOCK = 4096


@triton.jit
def _forward_kernel(
    logits,
    targets,
    logprobs,
    logsumexps,
    entropies,
    stride,
    num_columns,
    temperature,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * stride
    # Online over blocks: the greatest z so far, and the sums of exp(z - greatest) and of z exp(z - greatest).
    greatest = float("-inf")
    mass = 0.0
    weighted = 0.0
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < num_columns
        z = tl.load(row_logits + columns, mask=inside, other=float("-inf")).to(tl.float32) / temperature
        new_greatest = tl.maximum(greatest, tl.max(z, 0))
        # While all of them are -inf, as tokens left out by truncated sampling are, their differences would be nan.
        base = tl.where(new_greatest == float("-inf"), 0.0, new_greatest)
        shrink = tl.exp(greatest - base)
        share = tl.exp(z - base)
        mass = mass * shrink + tl.sum(share, 0)
        if HAS_ENTROPY:
            weighted = weighted * shrink + tl.sum(tl.where(share > 0, share * z, 0.0), 0)
        greatest = new_greatest
    logsumexp = greatest + tl.log(mass)
    chosen = tl.load(row_logits + tl.load(targets + row)).to(tl.float32) / temperature
    tl.store(logprobs + row, chosen - logsumexp)
    tl.store(logsumexps + row, logsumexp)
    if HAS_ENTROPY:
        tl.store(entropies + row, logsumexp - weighted / mass)


@triton.jit
def _backward_kernel(
    logits,
    logsumexps,
    targets,
    scaled,
    reached,
    shift,
    num_columns,
    temperature,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    places = logits + row * num_columns + columns
    z = tl.load(places, mask=inside, other=0.0).to(tl.float32) / temperature
    log_softmax = z - tl.load(logsumexps + row)
    upstream = tl.load(scaled + row)
    gradient = tl.exp(log_softmax) * upstream
    if HAS_ENTROPY:
        gradient = tl.exp(log_softmax) * (log_softmax * tl.load(reached + row) + tl.load(shift + row))
    gradient = tl.where(columns == tl.load(targets + row), gradient - upstream, gradient)
    tl.store(places, gradient.to(logits.dtype.element_ty), mask=inside)


def normalise(
    logits: Tensor, targets: Tensor, temperature: float, logprobs: Tensor, logsumexps: Tensor, entropies: Tensor | None
) -> None:
    """Write the targets' log-probabilities, the log-sum-exp of z, and the entropy in nats unless None: float32 [C] each.

    `logits` is [C, V] with C at least 1 and contiguous rows, in which -inf may stand; `targets` int64 [C].
    """
    num_rows, num_columns = logits.shape
    _forward_kernel[(num_rows,)](
        logits,
        targets,
        logprobs,
        logsumexps,
        logprobs if entropies is None else entropies,
        logits.stride(0),
        num_columns,
        temperature,
        HAS_ENTROPY=entropies is not None,
        BLOCK=min(FORWARD_BLOCK, triton.next_power_of_2(num_columns)),
        num_warps=8,
    )


def gradient_(
    logits: Tensor,
    logsumexps: Tensor,
    targets: Tensor,
    temperature: float,
    scaled: Tensor,
    reached: Tensor | None = None,
    shift: Tensor | None = None,
) -> Tensor:
    """Overwrite `logits` [C, V] with p (log p · reached + shift) - onehot · scaled; without `reached`, (p - onehot) scaled.

    `scaled`, `reached` and `shift` are upstream gradients divided by -temperature: float32 [C]. Returns `logits`.
    """
    num_rows, num_columns = logits.shape
    block = min(BACKWARD_BLOCK, triton.next_power_of_2(num_columns))
    _backward_kernel[(num_rows, triton.cdiv(num_columns, block))](
        logits,
        logsumexps,
        targets,
        scaled,
        scaled if reached is None else reached,
        scaled if shift is None else shift,
        num_columns,
        temperature,
        HAS_ENTROPY=reached is not None,
        BLOCK=block,
        num_warps=8,
    )
    return logits
