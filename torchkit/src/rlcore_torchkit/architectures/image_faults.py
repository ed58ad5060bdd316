"""Reasons why a class of transformers that reads images is refused.

Importing this file imports neither torch nor transformers.
"""

import inspect
import re
import sys

from rlcore_torchkit.transformers_import import import_transformers

_IMAGE_MASKS = re.compile("block_sequence_ids|token_type_ids_mask_function")
"""Functions of transformers that let all tokens of an image see each other."""


def image_fault(model_type: str) -> str:
    """Return what of the class that reads images is not computed; "" where transformers has no such class."""
    import_transformers()
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    name = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type)
    kind = None if name is None else getattr(transformers, name, None)
    if kind is None:
        return ""
    inputs = inspect.signature(kind.forward).parameters
    module = sys.modules[kind.__module__]
    classes = [found for _, found in inspect.getmembers(module, inspect.isclass)]
    if inputs.keys() & {"cross_attention_mask", "decoder_input_ids", "image_attention_mask"}:
        return f"{name}, whose layers read images by cross-attention"
    if inputs.keys() & {"token_type_ids", "mm_token_type_ids"} and _IMAGE_MASKS.search(inspect.getsource(module)):
        return f"{name}, whose tokens of an image see later ones of the same image"
    if "image_grid_thw" not in inputs:
        return f"{name}, which takes images without their grids of patches (image_grid_thw)"
    if not any(hasattr(found, "get_rope_index") for found in classes):
        return f"{name}, which has no get_rope_index for the positions of images"
    return f"{name}, whose vision tower no test covers"
