"""The kit's default reference: the model as `transformers` has it, in float32 on the CPU, one sequence at a time."""

import hashlib
import pkgutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from attrs import field, frozen

from rlcore.spi import ROUTED_EXPERTS, LossInputs, LossSpec, ModelSpec, TokenBatch
from rlcore.spi.arrays import Int16Array, Int32Array
from rlcore_conformance.references.reference import LEFT_OUT, Float64Array, left_out
from rlcore_conformance.references.tensors import Values
from rlcore_torchkit.transformers_import import import_transformers


class HuggingFaceReference:
    """Loads weights as anyone would: written to a safetensors file, read by from_pretrained."""

    def __init__(self, model: ModelSpec) -> None:
        self._model = model
        self.vocab_size = int(_model_config(model).vocab_size)

    def load(self, weights: Values) -> "HuggingFacePolicy":
        """A model with exactly these weights; AssertionError where transformers misses one or does not know it."""
        digest = hashlib.sha256()
        for name, value in weights.items():
            digest.update(f"{name} {value.shape} ".encode())
            digest.update(value.tobytes())
        return _load(self._model, _Weights(digest=digest.hexdigest(), values=weights))


class HuggingFacePolicy:
    """A model that transformers loaded, as a reference."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval()
        self.num_experts = int(getattr(model.config, "num_experts", 0))

    def logits(self, tokens: Int32Array) -> Float64Array:
        """float64 [L, V]"""
        import torch

        with torch.no_grad():
            logits: Float64Array = self._forward(tokens).double().numpy()
        return logits

    def choices(self, tokens: Int32Array) -> tuple[Int16Array, Float64Array]:
        """The routers' own choices, int16 [T, L, K] and their margins float64 [T, L]."""
        import torch

        seen: dict[int, Any] = {}
        with torch.no_grad(), self._routers(lambda layer, _, output: seen.update({layer: output[0].softmax(-1)})):
            self._forward(tokens)
        num_layers, top_k = len(self._model.model.layers), self._model.config.num_experts_per_tok
        experts = np.full((len(tokens), num_layers, top_k), -1, np.int16)
        margins = np.full((len(tokens), num_layers), np.inf)
        for layer, probabilities in seen.items():
            best = probabilities.topk(top_k + 1)
            experts[:, layer] = best.indices[:, :top_k].numpy()
            margins[:, layer] = (best.values[:, top_k - 1] - best.values[:, top_k]).numpy()
        return experts, margins

    def routed_logits(self, tokens: Int32Array, routed: Int16Array) -> Float64Array:
        """float64 [L, V], with tokens sent to the experts `routed`."""
        import torch

        with torch.no_grad():
            logits: Float64Array = self._forward(tokens, routed).double().numpy()
        return logits

    def gradient_norm(self, batch: TokenBatch, loss: LossSpec, temperature: float) -> float:
        """The norm by autograd through the loss on the whole batch, whose column ROUTED_EXPERTS says where tokens go."""
        import torch

        logprobs, entropies = [], []
        for index in range(batch.num_sequences):
            tokens = batch.tokens[batch.offsets[index] : batch.offsets[index + 1]]
            logits = self._sequence(batch, index)[:-1] / temperature
            if batch.sampling_mask is not None:
                rows = batch.sampling_mask.slice(int(batch.offsets[index]) + 1, int(batch.offsets[index + 1]))
                logits = logits.masked_fill(torch.from_numpy(left_out(rows, logits.shape[-1])), LEFT_OUT)
            table = torch.log_softmax(logits, -1)
            targets = torch.from_numpy(tokens[1:].astype(np.int64))
            zero = table.new_zeros(1)
            logprobs += [zero, table.gather(1, targets[:, None])[:, 0]]
            entropies += [zero, -(table.exp() * table).sum(-1)]
        entropy, current = torch.cat(entropies), torch.cat(logprobs)
        columns = {name: torch.from_numpy(column) for name, column in batch.token_columns.items()}
        previous = loss.previous_of(columns, current.detach())
        given = {"none": None, "metric": entropy.detach(), "loss": entropy}[loss.entropy]
        return gradient_norm(self._model, batch, loss, logprobs=current, previous_logprobs=previous, entropy=given)

    def _sequence(self, batch: TokenBatch, index: int) -> Any:
        own = slice(batch.offsets[index], batch.offsets[index + 1])
        routed = batch.token_columns.get(ROUTED_EXPERTS)
        return self._forward(batch.tokens[own], None if routed is None else routed[own])

    def _forward(self, tokens: Int32Array, routed: Int16Array | None = None) -> Any:
        import torch

        inputs = torch.from_numpy(tokens.astype(np.int64))[None]
        if routed is None:
            return self._model(input_ids=inputs).logits[0]
        forced = torch.from_numpy(routed.astype(np.int64))
        with self._routers(lambda layer, router, output: _sent_to(forced[:, layer], router, output)):
            return self._model(input_ids=inputs).logits[0]

    @contextmanager
    def _routers(self, watch: Callable[[int, Any, Any], Any]) -> Iterator[None]:
        """`watch` sees each router's output (logits, weights, experts), with its layer's number, and may return another."""
        hooks = [
            layer.mlp.gate.register_forward_hook(lambda router, _, output, index=index: watch(index, router, output))
            for index, layer in enumerate(self._model.model.layers)
            if hasattr(layer.mlp, "experts")
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _sent_to(experts: Any, router: Any, output: Any) -> Any:
    """A router's output with the experts int64 [T, K] in place of its own, but where they are -1."""
    logits, _, own = output
    chosen = experts.where(experts >= 0, own)
    weights = logits.softmax(-1).gather(1, chosen)
    return logits, weights / weights.sum(-1, keepdim=True) if router.norm_topk_prob else weights, chosen


def load_model(model: ModelSpec, weights: Values, auto_class: str, config: Any) -> Any:
    """A model by one of transformers' auto classes with exactly these weights, in float32; AssertionError where one is missing
    or unknown."""
    import_transformers()
    import transformers
    from safetensors.numpy import save_file

    with tempfile.TemporaryDirectory() as name:
        config.save_pretrained(name)
        arrays = {key: np.ascontiguousarray(value) for key, value in weights.items()}
        save_file(arrays, Path(name) / "model.safetensors", metadata={"format": "pt"})
        loaded, report = getattr(transformers, auto_class).from_pretrained(
            name,
            dtype="float32",
            attn_implementation="eager",
            trust_remote_code=model.trust_remote_code,
            output_loading_info=True,
            use_safetensors=True,
        )
    wrong = {kind: found for kind, found in report.items() if found}
    assert not wrong, f"the exported weights are not those of the model: {wrong}"
    return loaded


def gradient_norm(model: Any, batch: TokenBatch, loss: LossSpec, **outputs: Any) -> float:
    """The norm of a loss's gradient by all parameters; `outputs` are the model's, by the fields of LossInputs."""
    import torch

    inputs = LossInputs(
        loss_mask=torch.from_numpy(batch.loss_mask),
        offsets=torch.from_numpy(batch.offsets),
        token_columns={name: torch.from_numpy(column) for name, column in batch.token_columns.items()},
        sequence_columns={name: torch.from_numpy(column) for name, column in batch.sequence_columns.items()},
        counts=batch.counts(),
        **outputs,
    )
    output = pkgutil.resolve_name(loss.path)(inputs, loss.config)
    grads = torch.autograd.grad(output.loss, list(model.parameters()), allow_unused=True)
    return float(torch.stack([grad.double().square().sum() for grad in grads if grad is not None]).sum().sqrt())


@frozen(kw_only=True)
class _Weights:
    digest: str
    values: Values = field(eq=False)


@lru_cache(maxsize=2)
def _load(model: ModelSpec, weights: _Weights) -> HuggingFacePolicy:
    """Kept, since most checks start from the same weights or go back and forth between two."""
    return HuggingFacePolicy(load_model(model, weights.values, "AutoModelForCausalLM", _model_config(model)))


@lru_cache(maxsize=8)
def _model_config(model: ModelSpec) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model.path, revision=model.revision, trust_remote_code=model.trust_remote_code)
