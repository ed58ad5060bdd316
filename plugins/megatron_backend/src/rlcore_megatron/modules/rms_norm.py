"""The norm of layers that are not TransformerEngine's, and that behind attention and MLP in some families."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_rank
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F


class PlainRMSNorm(nn.RMSNorm):
    """weight · x / √(mean x² + ε) over the last dimension, in the form that Megatron builds norms; with zero-centred weights
    (1 + weight) · x / √(mean x² + ε), in float32 throughout as transformers computes Gemma's.

    Its own wrapper of torch's refuses sequence parallelism, whose gradients only need the mark that is set here.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.is_zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, states: Tensor) -> Tensor:
        """The norm of states [..., H], in their dtype."""
        if not self.is_zero_centered:
            return super().forward(states)
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        return F.rms_norm(wide, wide.shape[-1:], 1.0 + self.weight.to(wide.dtype), self.eps).type_as(states)


class WideNorm(nn.Module):
    """The norm over all heads of queries or keys together, of which tensor ranks have some each.

    Every rank has the whole weight and trains its heads' part: Megatron adds the gradients of these norms up.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, num_heads: int = 1) -> None:
        super().__init__()
        place = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = nn.Parameter(torch.ones(num_heads * hidden_size, **place))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        """The norm of this rank's heads [..., heads, D], in their dtype."""
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        squares: Tensor = reduce_from_tensor_model_parallel_region(wide.square().sum((-2, -1), keepdim=True))
        # Each rank's heads read the sum: its gradient is the sum of what all of them make.
        squares = copy_to_tensor_model_parallel_region(squares)
        normed = (wide * (squares / len(self.weight) + self.eps).rsqrt()).type_as(states)
        heads = self.weight.view(-1, states.shape[-1])
        first = get_tensor_model_parallel_rank() * states.shape[-2]
        return normed * heads[first : first + states.shape[-2]]


class QueryNorm(WideNorm):
    """The norm over all heads of queries, in the form that Megatron builds norms of heads."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(config, hidden_size, eps, num_heads=config.num_attention_heads)


class KeyNorm(WideNorm):
    """The norm over all heads of keys."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(config, hidden_size, eps, num_heads=config.num_query_groups)


class OutputNorm(PlainRMSNorm):
    """The norm of what attention or MLP gives, in the place where Megatron adds that to the residual."""

    def forward(self, *_: bool) -> Callable[..., Tensor]:  # type: ignore[override]
        """Compute both, which Megatron asks for by whether it trains and whether it fuses operations."""
        return self._add

    def _add(self, output_and_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:  # noqa: ARG002 - it is 0
        return residual + super().forward(output_and_bias[0])
