"""The part of transformers' classes that reads images, and its tensors in the files; importing this file imports no torch."""

from collections.abc import Iterator
from typing import Any

from rlcore_megatron.families.weight_source import HfTensor, Source
from rlcore_torchkit.huggingface.models import empty_model

VISION = "vision."
"""Prefix of the names of the tower's parameters."""


def empty_vision(hf: Any) -> tuple[Any, Any]:
    """The model of a transformers config without values, and the part of it that reads images: its tower, what projects the
    tower's output, and the methods of their class. The second has no language model."""
    model = empty_model(hf, str(hf.name_or_path))
    vision = model.base_model
    del vision.language_model
    return model, vision


def vision_sources(hf: Any) -> Iterator[Source]:
    """Yield the sources of the tower's parameters, which each tensor rank of the first stage holds whole."""
    from transformers.core_model_loading import revert_weight_conversion

    model, vision = empty_vision(hf)
    for name, parameter in vision.named_parameters():
        (stored,) = revert_weight_conversion(model, {f"{model.base_model_prefix}.{name}": parameter})
        yield Source(parameter=f"{VISION}{name}", tensors=(HfTensor(name=stored, shape=tuple(parameter.shape)),))
