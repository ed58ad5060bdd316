"""Copies of many small tensors, without a call for each."""

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_each(places: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy each tensor into its place, of the same shape and perhaps another dtype or device."""
    # One tensor that is not contiguous would make torch copy each by itself.
    groups: tuple[tuple[list[Tensor], list[Tensor]], ...] = (([], []), ([], []))
    for place, tensor in zip(places, tensors, strict=True):
        to, of = groups[place.is_contiguous() and tensor.is_contiguous()]
        to.append(place)
        of.append(tensor)
    with torch.no_grad():
        for to, of in groups:
            if to:
                torch._foreach_copy_(to, of)
