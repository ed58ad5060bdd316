"""Batch-invariant kernels, which the trainer has too, for what vLLM's own mode leaves to the batch.

Its sum of a layer's output and the residual is fused with the norm behind it in a kernel that is launched otherwise for fewer
rows, with other results. Its product for logits in float32 is a library's, which chooses tiles by the number of rows. And its
sum over tensor ranks is one of several algorithms, which add in different orders.
"""

from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rlcore_torchkit.head.float32_logits import float32_logits

HEAD = "_apply_head"
"""The method of vLLM's LogitsProcessor that multiplies by the head."""
SUM = "tensor_model_parallel_all_reduce"
"""The function of vLLM's linear layers that adds the ranks' products."""
Normed: TypeAlias = Tensor | tuple[Tensor, Tensor]


def use_invariant_kernels() -> None:
    """Replace these in vLLM, in this process, before a model is built."""
    from vllm.model_executor.layers import layernorm, linear
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    layernorm.rms_norm_batch_invariant = sum_first(layernorm.rms_norm_batch_invariant)
    setattr(LogitsProcessor, HEAD, apply_head)
    setattr(linear, SUM, sum_of_ranks)


def sum_first(norm: Callable[..., Any]) -> Callable[..., Normed]:
    """vLLM's norm of a kernel, with the residual added before it by torch."""

    def normed(input: Tensor, weight: Tensor | None, eps: float = 1e-6, residual: Tensor | None = None) -> Normed:
        if residual is None:
            return norm(input, weight, eps)
        total = input + residual
        return norm(total, weight, eps), total

    return normed


def sum_of_ranks(product: Tensor) -> Tensor:
    """[T, N]: the tensor ranks' products [T, N], added in the order of ranks and rounded at each sum."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    return reduce(add, group.all_gather(product[None], dim=0).unbind()) if group.world_size > 1 else product


def apply_head(processor: Any, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None) -> Tensor:
    """The method HEAD for logits in float32 without a bias: [B, V] from states [B, H]."""
    if processor.head_dtype != torch.float32 or embedding_bias is not None:
        found = f"{processor.head_dtype}, {'no bias' if embedding_bias is None else 'a bias'}"
        raise ValueError(f"batch-invariant head: found {found}; expected torch.float32, no bias")
    return float32_logits(hidden_states, lm_head.weight)
