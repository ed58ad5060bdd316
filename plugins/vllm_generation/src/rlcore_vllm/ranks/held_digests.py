"""Digests of what a rank of an engine computes with: the proof that renamed, fused and processed weights are those of a refit.

A refit's own digests are of tensors as they arrive. These are of vLLM's parameters after its loaders, and of what it makes of
them, such as the products that latent attention absorbs. Two engines of one model and one kind hold the same weights where
these are equal.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rlcore_torchkit.refit.digest import tensor_digests

_CACHES = frozenset({"kv_cache", "kv_cache_block_scales"})
"""Attributes that hold states of sequences."""
_PROBE_ROWS = 4


@torch.no_grad()
def held_digests(model: nn.Module) -> dict[str, int]:
    """Return the digest of each parameter, buffer and other tensor of each layer, by its name in the model.

    On a CPU vLLM packs weights of linear layers into objects that cannot be read. Of such a layer it is the digest of its
    outputs for fixed inputs.
    """
    names, tensors = [], []
    for prefix, layer in model.named_modules():
        for name, tensor in _tensors(layer):
            if tensor.numel() and not tensor.is_meta:
                names.append(f"{prefix}.{name}")
                tensors.append(tensor.detach().contiguous())
    return dict(zip(names, tensor_digests(tensors), strict=True))


def _tensors(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    attributes: dict[str, Any] = {**layer._parameters, **layer._buffers, **vars(layer)}
    for name, value in attributes.items():
        packed = getattr(layer, "cpu_linear", None) if name == "weight" else None
        if packed is not None and not value.numel():
            yield name, _outputs(layer, packed)
        elif isinstance(value, Tensor) and name not in _CACHES:
            yield name, value


def _outputs(layer: Any, packed: Any) -> Tensor:
    widths = (getattr(layer, name, None) for name in ("input_size_per_partition", "input_size", "embedding_dim"))
    width = next(width for width in widths if width is not None)
    generator = torch.Generator().manual_seed(width)
    probe = torch.rand((_PROBE_ROWS, width), generator=generator).to(layer.weight.dtype) - 0.5
    outputs: Tensor = packed(probe, layer.weight, None)
    return outputs
