"""Outputs of layers for fixed inputs, which stand for weights that vLLM packs for a CPU into objects that cannot be read."""

from typing import Any

import torch
from torch import Tensor

_PROBE_ROWS = 4


def packed_outputs(layer: Any, name: str) -> Tensor | None:
    """[rows, outputs]: the outputs of a linear layer whose weight is packed; None of other layers and tensors."""
    packed = getattr(layer, "cpu_linear", None) if name == "weight" else None
    if packed is None or layer.weight.numel():
        return None
    widths = (getattr(layer, key, None) for key in ("input_size_per_partition", "input_size", "embedding_dim"))
    width = next(width for width in widths if width is not None)
    generator = torch.Generator().manual_seed(width)
    probe = torch.rand((_PROBE_ROWS, width), generator=generator).to(layer.weight.dtype) - 0.5
    outputs: Tensor = packed(probe, layer.weight, None)
    return outputs
