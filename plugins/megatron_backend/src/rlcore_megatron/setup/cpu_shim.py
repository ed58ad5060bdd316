"""Megatron-Core without CUDA: it asks for CUDA by name in many places, and each of them can be answered with the CPU.

On CUDA nothing here does anything. What is redirected was found by running every layout on gloo against one process. Attributes
are replaced by `unittest.mock.patch.object`, which puts back what was inherited, or was not there, as it was.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import random as parallel_random
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor
from torch.overrides import TorchFunctionMode

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # without TransformerEngine it is not bound, and the router then asks whether it is None


@contextmanager
def cuda_or_cpu(device: str = "cuda") -> Iterator[None]:
    """Surrounds every call into Megatron-Core; for this thread only, and may be entered again inside.

    `device` is "cpu" for a model that stays there though there may be a GPU, such as one that is exported beside a server.
    """
    if (device == "cuda" and torch.cuda.is_available()) or _Redirect.active():
        yield
        return
    with ExitStack() as stack:
        # Fused functions are compiled at import, and a compiler for CPU is no requirement.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for target, replacements in _REPLACEMENTS:
            for name, replacement in replacements.items():
                stack.enter_context(mock.patch.object(target, name, replacement))
        stack.enter_context(_Redirect())
        yield


class _Redirect(TorchFunctionMode):
    """Tensors meant for CUDA are made on the CPU and stay there."""

    depth = 0

    @classmethod
    def active(cls) -> bool:
        return cls.depth > 0

    def __enter__(self) -> Any:
        type(self).depth += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        type(self).depth -= 1
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)  # the optimizers compare names
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs = kwargs | {"device": torch.device("cpu")}
        if kwargs.get("pin_memory"):
            kwargs = kwargs | {"pin_memory": False}
        return func(*args, **kwargs)


class _Idle:
    """A stream or an event: work on a CPU is done when it is queued."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self

    def __enter__(self) -> "_Idle":
        return self

    def __exit__(self, *_: Any) -> None: ...


def _nothing(*_: Any, **__: Any) -> None: ...


def _cpu(*_: Any) -> torch.device:
    return torch.device("cpu")


def _get_rng_state(*_: Any, **__: Any) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ARG001 - as Megatron's
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


_set_states = DistributedOptimizer._set_main_param_and_optimizer_states


def _set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: Any) -> None:
    """torch's AdamW, which stands in for the fused one of CUDA, counts steps in its state too."""
    group, order = self.model_param_group_index_map[model_param]
    state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
    with torch.no_grad():
        _set_states(self, model_param, {**({"step": state["step"]} if "step" in state else {}), **tensors})


_REPLACEMENTS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (
        torch.cuda,
        {
            "current_device": _cpu,
            "synchronize": _nothing,
            "set_device": _nothing,
            "empty_cache": _nothing,
            "Stream": _Idle,
            "Event": _Idle,
            "current_stream": _Idle,
            "default_stream": _Idle,
            "stream": _Idle,
            "manual_seed": _manual_seed,
            "get_rng_state": _get_rng_state,
            "set_rng_state": _set_rng_state,
        },
    ),
    (parallel_random, {"_get_cuda_rng_state": _get_rng_state, "_set_cuda_rng_state": _set_rng_state}),
    (token_dispatcher, {"maybe_move_tensor_to_cpu": _move_to_cpu}),
    (DistributedOptimizer, {"_set_main_param_and_optimizer_states": _set_main_param_and_optimizer_states}),
)
