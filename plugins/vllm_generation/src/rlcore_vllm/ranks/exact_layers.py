"""Corrections of layers in which vLLM computes something else than transformers' classes, and so than the trainer."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.spi import ContractError

STEPS_FROM_MINIMUM = frozenset({"nemotron_h", "zamba2"})
"""Models, by model_type, whose steps of time transformers clamps from time_step_min; the others' lie in time_step_limit."""


def compute_as_transformers() -> None:
    """Have vLLM's loaders correct the layers of each model that they build."""
    from vllm.model_executor.model_loader import base_loader

    own: Any = base_loader.initialize_model
    if hasattr(own, "rlcore_own"):
        return

    def initialize(*args: Any, **options: Any) -> nn.Module:
        model: nn.Module = own(*args, **options)
        for layer in model.modules():
            if correct := CORRECTIONS.get(type(layer).__name__):
                correct(layer)
        for parameter in model.parameters():
            _name_loader(getattr(parameter, "weight_loader", None))
        return model

    initialize.rlcore_own = own  # type: ignore[attr-defined]
    base_loader.initialize_model = initialize


def _name_loader(loader: Any) -> None:
    """Give a partial function its function's name: vLLM's layerwise reload asks each weight loader for one."""
    if isinstance(loader, partial):
        loader.__name__ = getattr(loader.func, "__name__", "partial")  # type: ignore[attr-defined]


def _approximate_gelu(layer: Any) -> None:
    """transformers' BLOOM has the approximation by tanh; vLLM the exact function, which moves log-probabilities by 1e-4."""
    layer.gelu_impl = nn.GELU(approximate="tanh")


def _take_dtype(layer: nn.Module) -> None:
    """Have the activation of Apertus keep its parameters in the model's dtype, which is torch's default as a model is built;
    vLLM keeps them in bfloat16."""
    layer.to(torch.get_default_dtype())


def _shorten_window(layer: Any) -> None:
    """Some versions of vLLM let a token of Cohere's models see one more token than config.json and transformers say."""
    if layer.sliding_window is not None and layer.sliding_window == layer.config.sliding_window + 1:
        impl = layer.attn.impl
        window = getattr(impl, "sliding_window", None)
        if isinstance(window, int):
            impl.sliding_window = window - 1
        elif isinstance(window, tuple):
            impl.sliding_window = (window[0] - 1, window[1])
        else:
            found = f"{type(impl).__name__} with sliding_window = {window}"
            raise ContractError(f"found {found}; expected a number or a tuple. Take another attention backend of vLLM")
        if hasattr(impl, "window_left"):  # FlashInfer's copy
            impl.window_left -= 1


def _clamp_steps(layer: Any) -> None:
    """Clamp the steps of time of a Mamba-2 layer as transformers does; vLLM leaves them as they are.

    step = softplus(x + bias), which rises with x: the layer's projection clamps x instead.
    """
    config = None if layer.model_config is None else layer.model_config.hf_text_config
    lowest, highest = step_limits(config)
    if lowest <= 0 and highest == math.inf:
        return
    if config.model_type == "falcon_h1":  # which multiplies x by a number before the softplus
        raise ContractError(
            f"found time_step_limit = [{lowest}, {highest}] of falcon_h1; expected [0.0, inf], which vLLM computes. "
            'Take the generator "transformers"'
        )

    def clamp(projection: nn.Module, inputs: Any, output: tuple[Tensor, Any]) -> None:  # noqa: ARG001
        steps, bias = output[0][..., -layer.dt_bias.shape[0] :], layer.dt_bias.float()
        bounds = [None if limit is None else (limit - bias).to(steps.dtype) for limit in (least, most)]
        steps.clamp_(*bounds)

    least = math.log(math.expm1(lowest)) if lowest > 0 else None
    most = math.log(math.expm1(highest)) if highest < math.inf else None
    layer.in_proj.register_forward_hook(clamp)


def step_limits(config: Any) -> tuple[float, float]:
    """Return the smallest and largest step of time of a model's Mamba-2 layers, as transformers' class of it clamps them."""
    if getattr(config, "model_type", None) in STEPS_FROM_MINIMUM:
        return config.time_step_min, math.inf
    lowest, highest = getattr(config, "time_step_limit", None) or (0.0, math.inf)
    return lowest, highest


CORRECTIONS: Mapping[str, Callable[[Any], None]] = {
    "BloomMLP": _approximate_gelu,
    "Cohere2MoeAttention": _shorten_window,
    "CohereAttention": _shorten_window,
    "MambaMixer2": _clamp_steps,
    "XIELU": _take_dtype,
}
"""The correction of a layer by the name of its class in vLLM."""
