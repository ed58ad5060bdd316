"""Logits in float32, as trainer and generator compute them where both are to get the same bits."""

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


def float32_logits(states: Tensor, head: Tensor) -> Tensor:
    """float32 [C, V] from states [C, H] and head [V, H]; on CUDA each row is the same whatever rows are beside it."""
    if states.is_cuda:
        from rlcore_torchkit.head.head_kernels import product

        return product(states, head)
    return states.float() @ head.float().T


def scaled_logits(states: Tensor, head: Tensor, temperature: float) -> Tensor:
    """float32 [T, N] from states [T, K] and head [N, K], divided by the temperature."""
    logits = float32_logits(states, head)
    if temperature == 1.0:
        return logits
    if not states.is_cuda:
        return logits / temperature
    # Not within the kernel that normalises: a compiler makes one operation of a product and the difference behind it.
    slots = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
    _sampling().apply_temperature(logits, slots, torch.full((1,), temperature, device=logits.device))
    return logits


@cache
def _sampling() -> Any:
    return import_module("vllm.v1.worker.gpu.sample.gumbel")
