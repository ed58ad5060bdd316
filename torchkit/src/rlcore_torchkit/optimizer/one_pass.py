"""AdamW's step with moments in 8 bits as one kernel, which reads and writes 14 bytes an element; operators alone move 270.

Shapes: N blocks of 256 elements, as in `moments`.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rlcore_torchkit.optimizer.moments import LEAST_SCALE, Columns, code_values, first_shares
from rlcore_torchkit.optimizer.settings import BLOCK, TensorSettings

MOST_COMPILED = 64
"""Forms of tensors that the kernel is compiled for in one process, more than there can be: torch's own limit is 8."""


def takes(columns: Columns, device: torch.device) -> bool:
    """Return whether these columns are whole blocks on a device that the kernel is compiled for."""
    return device.type == "cuda" and not (columns.first % BLOCK or columns.stop % BLOCK)


def step_numbers(settings: TensorSettings, rate: float, eps: float, num_steps: Tensor, factor: float = 1.0) -> Tensor:
    """float32 [8], on the device of `num_steps`: what `update` computes with in this step, a scalar counted from 1.

    `factor` multiplies the gradients.
    """
    (first, second), steps = settings.betas, num_steps.double()
    constant = steps.new_tensor([factor, 1 - first, second, 1 - second, rate * settings.weight_decay, eps])
    own = torch.stack([rate / (1 - first**steps), (1 - second**steps).sqrt()])
    return torch.cat([constant, own]).float()


def update_in_one_pass(
    weights: Tensor,
    remainders: Tensor | None,
    gradients: Tensor,
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    numbers: Tensor,
) -> None:
    """Do `update` of tensors [..., C] and scales [..., C / 256], all of which are views of what is kept."""
    flat = [None if one is None else one.view(-1) for one in (weights, remainders, gradients, *codes)]
    kept = [scale.reshape(-1) for scale in scales]  # of some columns, copies
    maps = [find(signed, weights.device) for find in (code_values, first_shares) for signed in (True, False)]
    with torch._dynamo.config.patch(recompile_limit=MOST_COMPILED):
        compiled()(*flat[:3], flat[3:], kept, maps, numbers)
    for scale, own in zip(scales, kept, strict=True):
        if not scale.is_contiguous():
            scale.copy_(own.view(scale.shape))


def update(
    weights: Tensor,
    remainders: Tensor | None,
    gradients: Tensor,
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    maps: Sequence[Tensor],
    numbers: Tensor,
) -> None:
    """Do AdamW's step in place (arXiv:1711.05101, algorithm 2) of elements [256 N] and scales [N].

    Weights are float32, or bfloat16 beside the remainders of their masters. Codes, uint8, and scales are those of the first and
    the second moment. `maps` are what codes stand for and where they begin, of each.
    """
    factor, share, kept, added, decay, eps, rate, root = numbers.unbind()
    gradients = gradients.float() * factor
    mean, square = (maps[i][codes[i].int()] * scales[i].unsqueeze(-1).expand(-1, BLOCK).reshape(-1) for i in range(2))
    mean = mean + share * (gradients - mean)
    square = kept * square + added * gradients * gradients
    masters = weights if remainders is None else joined(weights, remainders)
    masters = masters - decay * masters
    masters = masters - rate * mean / (square.sqrt() / root + eps)
    for i, moment in enumerate((mean.view(-1, BLOCK), square.view(-1, BLOCK))):
        largest = moment.abs().amax(-1)
        shares = moment / largest.clip(LEAST_SCALE).unsqueeze(-1)
        codes[i].copy_(torch.bucketize(shares, maps[2 + i], right=True, out_int32=True).view(-1))
        scales[i].copy_(largest)
    if remainders is None:
        weights.copy_(masters)
    else:
        upper, lower = divided(masters)
        weights.copy_(upper)
        remainders.copy_(lower)


def joined(weights: Tensor, remainders: Tensor) -> Tensor:
    """float32 masters, of bfloat16 weights and int16 remainders: the lower halves of the bits, as TransformerEngine keeps them
    with `store_param_remainders`. Where these are negative, half of an upper one's last place or more, it was rounded up."""
    upper = weights.view(torch.int16).int() - (remainders < 0).int()
    return ((upper << 16) | (remainders.int() & 0xFFFF)).view(torch.float32)


def divided(masters: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `joined`: return weights and remainders. What is no number stays so."""
    bits = masters.view(torch.int32)
    remainders, upper = bits.to(torch.int16), bits >> 16
    is_last = upper & 0x7FFF == 0x7FFF  # of the upper halves: a NaN, which one more would make a zero
    return (upper + ((remainders < 0) & ~is_last).int()).to(torch.int16).view(torch.bfloat16), remainders


@cache
def compiled() -> Any:
    """`update` as a compiler makes it: one kernel on a GPU, for all sizes."""
    return torch.compile(update, fullgraph=True, dynamic=True)
