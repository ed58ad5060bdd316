"""Digests of what a rank of an engine computes with: the proof that renamed, fused and processed weights are those of a refit.

A refit's own digests are of tensors as they arrive. These are of the engine's parameters after its loaders, and of what it
makes of them, such as the products that latent attention absorbs. Two engines of one kind and model hold the same weights where
these are equal.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rlcore_torchkit.refit.digest import tensor_digests

_CACHES = frozenset({"kv_cache", "kv_cache_block_scales"})
"""Attributes that hold states of sequences."""


@torch.no_grad()
def held_digests(model: nn.Module, unpacked: Callable[[nn.Module, str], Tensor | None] = lambda *_: None) -> dict[str, int]:
    """Return the digest of each parameter, buffer and other tensor of each layer, by its name in the model.

    `unpacked` gives what stands for a tensor of a layer, by its name there, that the engine has packed into an object that
    cannot be read; None for other tensors.
    """
    held: dict[str, Tensor] = {}
    for prefix, layer in model.named_modules():
        attributes: dict[str, Any] = {**layer._parameters, **layer._buffers, **vars(layer)}
        for name, value in attributes.items():
            tensor = unpacked(layer, name)
            tensor = value if tensor is None else tensor
            if isinstance(tensor, Tensor) and name not in _CACHES and tensor.numel() and not tensor.is_meta:
                held[f"{prefix}.{name}" if prefix else name] = tensor.detach().contiguous()
    return dict(zip(held, tensor_digests(held.values()), strict=True))
