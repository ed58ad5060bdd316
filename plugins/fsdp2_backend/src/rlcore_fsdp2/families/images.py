"""Tiny random models of text and images, batches that read images, and transformers' own forward pass of them."""

import io
import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve
from torch import Tensor

from rlcore.spi import ModelSpec, TokenBatch
from rlcore.spi.arrays import offsets_of
from rlcore_fsdp2.families.reference import TrainedReference
from rlcore_torchkit.testing.families.reference import make_batch
from rlcore_torchkit.testing.families.tiny import VOCAB_SIZE, tiny_options
from rlcore_torchkit.testing.models import make_tokenizer

_HIDDEN = 64
_PATCH = 4
_SIZES = ((16, 24), (40, 48))
"""Width and height of images in pixels; a token stands for 8 x 8 pixels."""
_READS = ((1,), (), (0, 1), (), (0,))
"""The images of each sequence of `make_batch`."""
_VISION: Mapping[str, Any] = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": _PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": _HIDDEN,
    "embed_dim": 32,
    "mlp_ratio": 2,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
    "fullatt_block_indexes": [1],
    "window_size": 16,
    "image_size": 32,
}
"""Tiny values by the names that fields of vision towers have."""


def make_tiny_image_model(model_type: str, class_name: str, directory: Path) -> None:
    """Write a tiny random model of `model_type` with its image processor."""
    from transformers import AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    make_tokenizer(directory, alphabet=string.printable[: VOCAB_SIZE - 2])
    kind = CONFIG_MAPPING[model_type]
    config = kind(**_options(kind()))
    config.architectures = [class_name]
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point() and tensor.ndim == 1:  # norms are 1 and biases 0: they would say little
                tensor.add_(torch.linspace(-0.1, 0.1, len(tensor)))
    model.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(_preprocessor(model_type)))


def _options(default: Any) -> dict[str, Any]:
    options, vision, text = tiny_options(default, {}), default.vision_config.to_dict(), default.text_config
    options["vision_config"] = {name: value for name, value in _VISION.items() if name in vision} | {"initializer_range": 0.2}
    if "embed_dim" in vision:  # of Qwen2-VL, whose `hidden_size` is the language model's
        options["vision_config"]["hidden_size"] = _HIDDEN
    heads = options["text_config"]["num_attention_heads"]
    rope = dict(text.rope_parameters or {"rope_type": "default", "rope_theta": 1e4})
    half = int(_HIDDEN // heads * rope.get("partial_rotary_factor", 1.0)) // 2
    rope["mrope_section"] = [half - 2 * (half // 4), half // 4, half // 4]
    options["text_config"] |= {"hidden_size": _HIDDEN, "rope_parameters": rope}
    if hasattr(text, "head_dim"):
        options["text_config"]["head_dim"] = _HIDDEN // heads
    return options


def _preprocessor(model_type: str) -> dict[str, Any]:
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    names = dict(IMAGE_PROCESSOR_MAPPING_NAMES).get(model_type) or {"torchvision": "Qwen2VLImageProcessor"}
    return {
        "image_processor_type": names.get("torchvision", names.get("pil")),
        "patch_size": _PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": (2 * _PATCH) ** 2, "longest_edge": 2 * 64 * 64},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }


def _png(number: int) -> bytes:
    from PIL import Image

    width, height = _SIZES[number]
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


class ImageReference(TrainedReference):
    """A model of images as transformers computes and torch trains it."""

    def __init__(self, model: ModelSpec) -> None:
        from transformers import AutoImageProcessor, AutoModelForImageTextToText

        super().__init__(model, AutoModelForImageTextToText)
        self._processor: Any = AutoImageProcessor.from_pretrained(model.path)

    def batch(self, highest: int) -> TokenBatch:
        """The batch of `make_batch`, whose sequences begin with a token and their images."""
        text, files = make_batch(highest), [_png(number) for number in range(len(_SIZES))]
        grids = self._inputs(tuple(files))["image_grid_thw"]
        counts = (grids.prod(1) // int(self._processor.merge_size) ** 2).tolist()
        image, sequences = int(self.model.config.image_token_id), []
        for own, reads in zip(np.split(text.tokens, text.offsets[1:-1]), _READS, strict=True):
            shown = [token for number in reads for token in (2, *[image] * counts[number])]
            sequences.append(np.concatenate([np.array(shown, np.int32), own]))
        added = [len(sequence) - length for sequence, length in zip(sequences, text.lengths, strict=True)]
        places = np.repeat(text.offsets[:-1], added)
        return evolve(
            text,
            tokens=np.concatenate(sequences),
            offsets=offsets_of([len(sequence) for sequence in sequences]),
            loss_mask=np.insert(text.loss_mask, places, False),
            token_columns={"weights": np.insert(text.token_columns["weights"], places, 0.0)},
            images=tuple(tuple(files[number] for number in reads) for reads in _READS),
        )

    def _inputs(self, files: tuple[bytes, ...]) -> dict[str, Tensor]:
        from PIL import Image

        images = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
        return dict(self._processor(images=images, return_tensors="pt"))

    def logits(self, tokens: Tensor, files: tuple[bytes, ...]) -> Tensor:
        """float32 [length, vocabulary] of one sequence."""
        inputs: dict[str, Tensor] = {}
        if files:
            inputs = self._inputs(files) | {"mm_token_type_ids": (tokens == self.model.config.image_token_id).int()[None]}
        self.model.base_model.rope_deltas = None
        found: Tensor = self.model(input_ids=tokens[None], use_cache=False, **inputs).logits[0]
        return found
