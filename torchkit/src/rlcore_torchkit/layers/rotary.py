"""Rotary position embedding on CPU, in a third of the operators that transformers' modules use.

Shapes: H heads, T tokens, D head size.
"""

from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

ROTATE = "apply_rotary_pos_emb"
"""The function of transformers' modules that rotates queries and keys."""
Rotate: TypeAlias = Callable[..., tuple[Tensor, Tensor]]


def fuse_rotary(model: nn.Module) -> None:
    """Let the attention of a transformers model rotate float32 on CPU by `_Rotation`; names and parameters stay as they are."""
    for module in model.modules():
        kind: Any = type(module)
        module.__class__ = _rotating(kind)


@cache
def _rotating(kind: Any) -> Any:
    """Return a class of modules whose forward finds another ROTATE; `kind` where it calls none, or one of another form."""
    forward: Any = kind.forward
    code, names = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    if code is None or ROTATE not in code.co_names or ROTATE not in names or not _rotates_halves(names[ROTATE]):
        return kind
    # The class alone finds the replacement: transformers' module stays as it is.
    own = FunctionType(
        code, {**names, ROTATE: partial(_rotate, names[ROTATE])}, code.co_name, forward.__defaults__, forward.__closure__
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    return type(kind.__name__, (kind,), {"forward": own, "__module__": kind.__module__})


def _rotates_halves(rotate: Rotate) -> bool:
    """Return whether it turns the first half of each head with the second, as `_Rotation` does."""
    query, cos, sin = torch.arange(1.0, 25.0).view(3, 1, 1, 2, 4)
    try:
        found = rotate(query, query, cos[0], sin[0])
    except Exception:  # it takes other arguments
        return False
    expected = _turned(query, cos, sin[..., :2], sin[..., 2:])
    return all(part.shape == expected.shape and torch.allclose(part, expected) for part in found)


def _rotate(
    rotate: Rotate, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *others: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """Rotate query and key [1, H, T, D] by cos and sin [1, T, D]; by `rotate` where they are not plain float32 on CPU, where
    angles are narrower than heads, or have gradients."""
    is_plain = all(type(part) is Tensor and part.dtype == torch.float32 for part in (query, key, cos, sin))
    is_whole = cos.shape[-1] == query.shape[-1] and not (cos.requires_grad or sin.requires_grad)
    if others or options or not is_plain or not is_whole or query.device.type != "cpu":
        return rotate(query, key, cos, sin, *others, **options)
    apply: Any = _Rotation.apply
    first, second = sin[:, None].chunk(2, -1)
    return apply(query, cos[:, None], first, second), apply(key, cos[:, None], first, second)


class _Rotation(torch.autograd.Function):
    """heads [1, H, T, D] by cos [1, 1, T, D] and the halves of the sine [1, 1, T, D / 2]."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, first: Tensor, second: Tensor) -> Tensor:
        ctx.save_for_backward(cos, first, second)
        return _turned(heads, cos, first, second)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        cos, first, second = ctx.saved_tensors
        return _turned(gradient, cos, -second, -first), None, None, None


def _turned(heads: Tensor, cos: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return [x₁ · c₁ - x₂ · s₁, x₂ · c₂ + x₁ · s₂] for the halves x₁ and x₂ of each head."""
    output = heads * cos
    width = heads.shape[-1] // 2
    output[..., :width].addcmul_(heads[..., width:], first, value=-1)
    output[..., width:].addcmul_(heads[..., :width], second)
    return output
