"""Corrections of layers in which vLLM computes something else than transformers' classes, and so than the trainer."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn


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
        window = impl.sliding_window
        impl.sliding_window = window - 1 if isinstance(window, int) else (window[0] - 1, window[1])


CORRECTIONS: Mapping[str, Callable[[Any], None]] = {
    "BloomMLP": _approximate_gelu,
    "Cohere2MoeAttention": _shorten_window,
    "CohereAttention": _shorten_window,
    "XIELU": _take_dtype,
}
"""The correction of a layer by the name of its class in vLLM."""
