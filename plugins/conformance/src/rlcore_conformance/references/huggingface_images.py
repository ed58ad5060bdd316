"""The kit's default reference of models that read images: `transformers`, in float32 on the CPU, one sequence at a time."""

import copy
from typing import Any

from rlcore.spi import ModelSpec, TokenBatch
from rlcore.spi.arrays import Int16Array, Int32Array
from rlcore_conformance.references.huggingface_reference import HuggingFacePolicy, load_model
from rlcore_conformance.references.tensors import Values
from rlcore_model_files.images import decode_image, load_image_processor


def load_images(model: ModelSpec, weights: Values) -> "HuggingFaceImages":
    """A model with exactly these weights; AssertionError where transformers misses one or does not know it."""
    from transformers import AutoConfig

    processor = load_image_processor(model.path, model.revision, trust_remote_code=model.trust_remote_code)
    loaded = load_model(model, weights, "AutoModelForImageTextToText", AutoConfig.from_pretrained(model.path))
    return HuggingFaceImages(loaded, processor)


class HuggingFaceImages(HuggingFacePolicy):
    """A model that transformers loaded, as a reference that reads images."""

    def __init__(self, model: Any, processor: Any) -> None:
        super().__init__(model)
        self._processor = processor
        self._files: tuple[bytes, ...] = ()

    def reading(self, files: tuple[bytes, ...]) -> "HuggingFaceImages":
        """Return a view of the model whose sequences read these images."""
        found = copy.copy(self)
        found._files = files
        return found

    def _sequence(self, batch: TokenBatch, index: int) -> Any:
        files = () if batch.images is None else batch.images[index]
        return self.reading(files)._forward(batch.tokens[batch.offsets[index] : batch.offsets[index + 1]])

    def _forward(self, tokens: Int32Array, routed: Int16Array | None = None) -> Any:
        import torch

        assert routed is None
        row = torch.from_numpy(tokens.astype("int64"))[None]
        given: dict[str, Any] = {}
        if self._files:
            images = [decode_image(file) for file in self._files]
            given = dict(self._processor(images=images, return_tensors="pt"))
            given["mm_token_type_ids"] = (row == self._model.config.image_token_id).int()
        self._model.model.rope_deltas = None  # of the sequence before
        return self._model(input_ids=row, use_cache=False, **given).logits[0]
