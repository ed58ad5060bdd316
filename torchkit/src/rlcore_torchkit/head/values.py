"""Values of a model's tokens: one linear output each, in place of the vocabulary's head.

Shapes: T tokens, H hidden size.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn

from rlcore_torchkit.head.logprobs import packed_forward
from rlcore_torchkit.head.softmax_chunks import wide_dtype
from rlcore_torchkit.layers.attention import PackedSequences


def token_values(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden weightᵀ: float32 [T], from hidden [T, H] and weight [1, H] of any dtype; float64 stays float64.

    It is taken in float32 whatever the model computes in: differences of values are what is learned from."""
    dtype = wide_dtype(hidden.dtype)
    return hidden.to(dtype) @ weight[0].to(dtype)


def shared_by(hidden: Tensor, num_ranks: int) -> Tensor:
    """The hidden states, whose gradient is divided by the number of ranks that each send back the whole one, to be added up."""
    if num_ranks > 1 and hidden.requires_grad:
        hidden.register_hook(lambda gradient: gradient / num_ranks)  # type: ignore[no-untyped-call]
    return hidden


def has_value_head(model: nn.Module) -> bool:
    """Return whether a transformers model ends in a head of values."""
    return hasattr(model, "score")


def packed_values(model: nn.Module, tokens: Tensor, packed: PackedSequences) -> Tensor:
    """The value after each token, float32 [T]; `model` went through `patch_value_head`, `tokens` is int32 or int64 [T]."""
    values: Tensor = model(input_ids=tokens, packed=packed)
    return values


def patch_value_head(model: Any, num_ranks: int = 1) -> None:
    """Make a transformers sequence classifier with one label return `packed_values` from its forward.

    `num_ranks`: how many tensor ranks compute the same values, whose gradients the decoder adds up. As for `patch_head`, the
    call stays one call of the root module.
    """
    model.forward = partial(_value_forward, model, num_ranks)


def _value_forward(model: Any, num_ranks: int, input_ids: Tensor, packed: PackedSequences) -> Tensor:
    hidden = shared_by(packed_forward(model, input_ids, packed)[: packed.num_tokens], num_ranks)
    return token_values(hidden, model.score.weight)
