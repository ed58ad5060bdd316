"""The kit's default reference of values: *ForSequenceClassification of `transformers`, in float32 on the CPU."""

from typing import Any

import numpy as np

from rlcore.spi import LossSpec, ModelSpec, TokenBatch
from rlcore.spi.arrays import Int32Array
from rlcore_conformance.references.huggingface_reference import gradient_norm, load_model
from rlcore_conformance.references.reference import Float64Array
from rlcore_conformance.references.tensors import Values


def load_values(model: ModelSpec, weights: Values) -> "HuggingFaceValues":
    """A model with exactly these weights; AssertionError where transformers misses one or does not know it."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model.path, num_labels=1)
    return HuggingFaceValues(load_model(model, weights, "AutoModelForSequenceClassification", config))


class HuggingFaceValues:
    """A model of values that transformers loaded, as a reference."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval()

    def values(self, tokens: Int32Array) -> Float64Array:
        """float64 [L]"""
        import torch

        with torch.no_grad():
            found = self._forward(tokens)
            whole = self._model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).logits
        assert abs(float(whole) - float(found[-1])) < 1e-5 * max(1.0, abs(float(whole)))
        values: Float64Array = found.double().numpy()
        return values

    def gradient_norm(self, batch: TokenBatch, loss: LossSpec) -> float:
        """The norm by autograd through the loss on the whole batch."""
        import torch

        pairs = zip(batch.offsets[:-1], batch.offsets[1:], strict=True)
        values = torch.cat([self._forward(batch.tokens[start:end]) for start, end in pairs])
        return gradient_norm(self._model, batch, loss, logprobs=torch.zeros_like(values), entropy=None, values=values)

    def _forward(self, tokens: Int32Array) -> Any:
        import torch

        hidden = self._model.model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).last_hidden_state[0]
        return self._model.score(hidden)[:, 0]
