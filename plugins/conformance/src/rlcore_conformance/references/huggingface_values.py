"""The kit's default reference of values: *ForSequenceClassification of `transformers`, in float32 on the CPU."""

import pkgutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from rlcore.spi import LossInputs, LossSpec, ModelSpec, TokenBatch
from rlcore.spi.arrays import Int32Array
from rlcore_conformance.references.reference import Float64Array
from rlcore_conformance.references.tensors import Values
from rlcore_torchkit.transformers_import import import_transformers


def load_values(model: ModelSpec, weights: Values) -> "HuggingFaceValues":
    """A model with exactly these weights; AssertionError where transformers misses one or does not know it."""
    import_transformers()
    from safetensors.numpy import save_file
    from transformers import AutoConfig, AutoModelForSequenceClassification

    with tempfile.TemporaryDirectory() as name:
        AutoConfig.from_pretrained(model.path, num_labels=1).save_pretrained(name)
        arrays = {key: np.ascontiguousarray(value) for key, value in weights.items()}
        save_file(arrays, Path(name) / "model.safetensors", metadata={"format": "pt"})
        options = {"dtype": "float32", "attn_implementation": "eager", "output_loading_info": True}
        loaded, report = AutoModelForSequenceClassification.from_pretrained(name, use_safetensors=True, **options)
    wrong = {kind: found for kind, found in report.items() if found}
    assert not wrong, f"the exported weights are not those of the model: {wrong}"
    return HuggingFaceValues(loaded)


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
        inputs = LossInputs(
            logprobs=torch.zeros_like(values),
            entropy=None,
            loss_mask=torch.from_numpy(batch.loss_mask),
            offsets=torch.from_numpy(batch.offsets),
            token_columns={name: torch.from_numpy(column) for name, column in batch.token_columns.items()},
            sequence_columns={name: torch.from_numpy(column) for name, column in batch.sequence_columns.items()},
            counts=batch.counts(),
            values=values,
        )
        output = pkgutil.resolve_name(loss.path)(inputs, loss.config)
        grads = torch.autograd.grad(output.loss, list(self._model.parameters()))
        return float(torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt())

    def _forward(self, tokens: Int32Array) -> Any:
        import torch

        hidden = self._model.model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).last_hidden_state[0]
        return self._model.score(hidden)[:, 0]
