"""Arithmetic in float64, also where a model's own code asks for float32."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rlcore.spi import ModelSpec


def master_dtype(spec: ModelSpec) -> torch.dtype:
    """The dtype of master weights, adapters, gradients and moments of a model that computes in `spec.dtype`."""
    return torch.float64 if spec.dtype == "float64" else torch.float32


def arithmetic_of(spec: ModelSpec) -> AbstractContextManager[object]:
    """A block in which a model is built and computes: in float64 `Float64Arithmetic`, else a block that changes nothing."""
    return Float64Arithmetic() if spec.dtype == "float64" else nullcontext()


READS_BYTES = (torch.frombuffer, Tensor.view)
"""Calls whose dtype is that of bytes which are there."""


class Float64Arithmetic(TorchFunctionMode):
    """Replaces float32 by float64 in each call of torch that names a dtype.

    Models of transformers compute norms, rotary angles and routers' softmax in float32 whatever dtype their weights have.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in READS_BYTES:
            return func(*args, **(kwargs or {}))
        if func is Tensor.float:
            func = Tensor.double
        return func(*map(_wide, args), **{name: _wide(value) for name, value in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
