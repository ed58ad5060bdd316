"""The kit's default reference: the model as `transformers` has it, in float32 on the CPU, one sequence at a time."""

import pkgutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from rlcore.spi import LossInputs, LossSpec, ModelSpec, TokenBatch
from rlcore.spi.arrays import Int32Array
from rlcore.testing.conformance.reference import Float64Array
from rlcore.testing.conformance.tensors import Values


class HuggingFaceReference:
    """Loads weights as anyone would: written to a safetensors file, read by from_pretrained."""

    def __init__(self, model: ModelSpec) -> None:
        self._model = model
        self._config = _model_config(model)
        self.vocabulary_size = int(self._config.vocab_size)

    def load(self, weights: Values) -> "HuggingFacePolicy":
        """A model with exactly these weights; AssertionError where transformers misses one or does not know it."""
        from safetensors.numpy import save_file
        from transformers import AutoModelForCausalLM

        with tempfile.TemporaryDirectory() as name:
            self._config.save_pretrained(name)
            arrays = {key: np.ascontiguousarray(value) for key, value in weights.items()}
            save_file(arrays, Path(name) / "model.safetensors", metadata={"format": "pt"})
            model, report = AutoModelForCausalLM.from_pretrained(
                name,
                dtype="float32",
                attn_implementation="eager",
                trust_remote_code=self._model.trust_remote_code,
                output_loading_info=True,
            )
        wrong = {kind: found for kind, found in report.items() if found}
        assert not wrong, f"the exported weights are not those of the model: {wrong}"
        return HuggingFacePolicy(model)


class HuggingFacePolicy:
    """A loaded model."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval()

    def logits(self, tokens: Int32Array) -> Float64Array:
        """float64 [L, V]"""
        import torch

        with torch.no_grad():
            logits: Float64Array = self._forward(tokens).double().numpy()
        return logits

    def gradient_norm(self, batch: TokenBatch, loss: LossSpec, temperature: float) -> float:
        """By autograd through the loss on the whole batch."""
        import torch

        logprobs, entropies = [], []
        for index in range(batch.num_sequences):
            tokens = batch.tokens[batch.offsets[index] : batch.offsets[index + 1]]
            table = torch.log_softmax(self._forward(tokens)[:-1] / temperature, -1)
            targets = torch.from_numpy(tokens[1:].astype(np.int64))
            zero = table.new_zeros(1)
            logprobs += [zero, table.gather(1, targets[:, None])[:, 0]]
            entropies += [zero, -(table.exp() * table).sum(-1)]
        entropy = torch.cat(entropies)
        inputs = LossInputs(
            logprobs=torch.cat(logprobs),
            entropy={"none": None, "metric": entropy.detach(), "loss": entropy}[loss.entropy],
            loss_mask=torch.from_numpy(batch.loss_mask),
            offsets=torch.from_numpy(batch.offsets),
            token_columns={name: torch.from_numpy(column) for name, column in batch.token_columns.items()},
            sequence_columns={name: torch.from_numpy(column) for name, column in batch.sequence_columns.items()},
            counts=batch.counts(),
        )
        parameters = list(self._model.parameters())
        output = pkgutil.resolve_name(loss.path)(inputs, loss.config)
        grads = torch.autograd.grad(output.loss, parameters, allow_unused=True)
        return float(torch.stack([grad.double().square().sum() for grad in grads if grad is not None]).sum().sqrt())

    def _forward(self, tokens: Int32Array) -> Any:
        import torch

        return self._model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]


@lru_cache(maxsize=8)
def _model_config(model: ModelSpec) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model.path, revision=model.revision, trust_remote_code=model.trust_remote_code)
