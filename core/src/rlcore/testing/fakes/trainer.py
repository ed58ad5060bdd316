"""A correct trainer in numpy: the tables of `policy` under AdamW, float32 weights and float64 arithmetic."""

import json
import pkgutil
import zipfile
from collections.abc import Iterator, Mapping
from math import inf, isfinite, sqrt
from typing import Any
from zlib import crc32

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from rlcore import spi
from rlcore.spi.arrays import Float32Array
from rlcore.testing.fakes.policy import (
    Contexts,
    Float64Array,
    Forward,
    ValueForward,
    Weights,
    count_residency,
    make_value_weights,
    make_weights,
)
from rlcore.testing.fakes.tokenizer import VOCABULARY_SIZE

STATE_FILE, META_FILE = "fake_trainer.npz", "fake_trainer.json"


@frozen(kw_only=True)
class FakeTrainerConfig:
    """Options of the fake trainer."""

    vocab_size: int = VOCABULARY_SIZE
    """Tokens that the policy knows."""
    initial_scale: float = 0.0
    """Standard deviation of the initial weights; 0.0 begins with the uniform distribution."""
    instant: bool = False
    """Do nothing and be quick: weights stay, the loss is not evaluated, log-probabilities are those of the uniform
    distribution. For measuring what surrounds the trainer."""


class FakeTrainer:
    """The trainer backend `fake`, one rank."""

    def __init__(self, context: spi.TrainerContext, config: FakeTrainerConfig) -> None:
        self.layout = spi.TrainerLayout()
        self.config, self.context = config, context
        self.weight_version = 0
        scale = 0.0 if config.instant else config.initial_scale
        self.weights: Weights = make_weights(config.vocab_size, context.seed, scale)
        if context.head == "value":
            self.weights = make_value_weights(config.vocab_size, context.seed, scale, context.model.path)
        self.reference: Weights | None = None
        if context.needs_reference:
            seed = context.seed if context.reference is None else crc32(context.reference.path.encode())
            self.reference = make_weights(config.vocab_size, seed, scale)
        if self.reference is not None and not context.needs_policy:
            self.weights = self.reference
        self.num_updates = self.schedule_step = 0
        self.gradients: dict[str, Float64Array] = {}
        self.given: spi.OptimStepRequest | None = None
        """The settings of the optim_step under way."""
        self.moments: dict[str, tuple[Float64Array, Float64Array]] = {
            name: (np.zeros(value.shape), np.zeros(value.shape)) for name, value in self.weights.items() if context.needs_policy
        }
        self.rank_info = context.rank_info

    @spi.hookimpl
    def train_step(self, request: spi.TrainStepRequest) -> spi.TrainStepResult:
        """One update from all microbatches."""
        self.require_version("train_step", request.weight_version)
        loss, metrics, grads = self.accumulate(request)
        norm = norm_of(grads)
        if not (isfinite(loss) and isfinite(norm)):
            raise spi.NonFiniteError(
                f"train_step: found loss {loss} and gradient norm {norm}; expected finite ones. State kept"
            )
        self.check_bounds(metrics, request.bounds)
        logprobs = self.step_logprobs(request) if request.logprobs else None
        return spi.TrainStepResult(loss=loss, metrics=metrics, logprobs=logprobs, **self.update(request, grads, norm))

    @spi.hookimpl
    def forward_backward(self, request: spi.ForwardBackwardRequest) -> spi.ForwardBackwardResult:
        """The gradients of a piece, added to those held."""
        self.require_version("forward_backward", request.weight_version)
        held, self.gradients = self.gradients if request.piece else {}, {}
        loss, metrics, grads = self.accumulate(request)
        if not isfinite(loss):
            raise spi.NonFiniteError(f"forward_backward: found loss {loss}; expected a finite one. Gradients dropped")
        self.gradients = {name: grad + held.get(name, 0.0) for name, grad in grads.items()}
        logprobs = self.step_logprobs(request) if request.logprobs else None
        return spi.ForwardBackwardResult(loss=loss, metrics=metrics, logprobs=logprobs, weight_version=self.weight_version)

    @spi.hookimpl
    def optim_step(self, request: spi.OptimStepRequest) -> spi.OptimStepResult:
        """One update from the gradients held."""
        self.require_version("optim_step", request.weight_version)
        grads, self.gradients = self.gradients, {}
        norm = norm_of(grads)
        if not isfinite(norm):
            raise spi.NonFiniteError(f"optim_step: found gradient norm {norm}; expected a finite one. State kept")
        self.given = request
        result = spi.OptimStepResult(**self.update(request, grads, norm))
        self.given = None
        return result

    @spi.hookimpl
    def get_logprobs(self, request: spi.LogprobsRequest) -> spi.LogprobsResult:
        """Log-probabilities under the policy or the reference."""
        self.require_version("get_logprobs", request.weight_version)
        weights = self.weights if request.model == "policy" else self.reference
        if weights is None:
            raise spi.ContractError("get_logprobs: found a request for the reference; expected needs_reference in the context")
        both = [self.evaluate(weights, batch, request.temperature) for batch in request.microbatches]
        return spi.LogprobsResult(
            logprobs=tuple(logprobs.astype(np.float32) for logprobs, _ in both),
            entropy=tuple(entropy.astype(np.float32) for _, entropy in both) if request.entropy else None,
            weight_version=self.weight_version,
        )

    @spi.hookimpl
    def get_values(self, request: spi.ValuesRequest) -> spi.ValuesResult:
        """Values after every token."""
        self.require_version("get_values", request.weight_version)
        values = tuple(self.values(batch).values().astype(np.float32) for batch in request.microbatches)
        return spi.ValuesResult(values=values, weight_version=self.weight_version)

    @spi.hookimpl
    def export_weights(self, request: spi.ExportWeightsRequest) -> spi.WeightExport:
        """The three tables, and the head of values where there is one; in float32 the trainer's own."""
        self.require_version("export_weights", request.weight_version)
        if request.dtype == "bfloat16":
            raise spi.ContractError("export_weights: found dtype bfloat16; expected float32 or float16, which numpy has")
        dtype = np.dtype(request.dtype)
        tensors = {name: value.astype(dtype, copy=False) for name, value in self.weights.items()}
        return spi.WeightExport(
            weight_version=self.weight_version,
            specs=tuple(spi.TensorSpec(name=name, shape=value.shape, dtype=request.dtype) for name, value in tensors.items()),
            buckets=cut_into_buckets(tensors, request.max_bucket_bytes),
            persistent=request.dtype == "float32",
        )

    @spi.hookimpl
    def set_residency(self, request: spi.SetResidencyRequest) -> spi.SetResidencyResult:
        """Count the bytes that would be left on the device."""
        copies = 1 if self.reference is None or self.reference is self.weights else 2
        weight_bytes = copies * sum(value.nbytes for value in self.weights.values())
        state_bytes = sum(first.nbytes + second.nbytes for first, second in self.moments.values())
        return count_residency(self.rank_info, request, weight_bytes=weight_bytes, state_bytes=state_bytes)

    @spi.hookimpl
    def save_state(self, request: spi.SaveStateRequest) -> spi.SaveStateResult:
        """Write weights, moments and counters as .npz and JSON."""
        if request.kind != "resume":
            raise spi.ContractError(
                f"save_state: found kind {request.kind}; expected resume: the capability save_hf is not declared"
            )
        arrays: dict[str, Any] = {f"weights/{name}": value for name, value in self.weights.items()}
        for name, (first, second) in self.moments.items():
            arrays |= {f"first/{name}": first, f"second/{name}": second}
        np.savez(request.directory / STATE_FILE, **arrays)
        meta = {"weight_version": self.weight_version, "num_updates": self.num_updates}
        (request.directory / META_FILE).write_text(json.dumps(meta))
        return spi.SaveStateResult(files=(STATE_FILE, META_FILE))

    @spi.hookimpl
    def load_state(self, request: spi.LoadStateRequest) -> spi.LoadStateResult:
        """Restore what save_state wrote."""
        try:
            meta = json.loads((request.directory / META_FILE).read_text())
            with np.load(request.directory / STATE_FILE, allow_pickle=False) as file:
                arrays: dict[str, NDArray[Any]] = dict(file)
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise spi.CheckpointError(f"{request.directory}: the fake trainer's state cannot be read: {error}") from error
        for name, value in self.weights.items():
            if arrays[f"weights/{name}"].shape != value.shape:
                found = arrays[f"weights/{name}"].shape
                raise spi.CheckpointError(
                    f"{name}: found {found} in the checkpoint; expected {value.shape}: it is of another model"
                )
        for name, value in self.weights.items():
            value[...] = arrays[f"weights/{name}"]
            self.moments[name] = (arrays[f"first/{name}"], arrays[f"second/{name}"])
        self.weight_version, self.num_updates = meta["weight_version"], meta["num_updates"]
        if not request.optimizer:
            self.num_updates = 0
            self.moments = {name: (np.zeros(value.shape), np.zeros(value.shape)) for name, value in self.weights.items()}
        return spi.LoadStateResult(weight_version=self.weight_version)

    @spi.hookimpl
    def close(self, request: spi.CloseRequest) -> None:  # noqa: ARG002
        """Free everything."""
        self.weights, self.reference, self.moments = {}, None, {}

    def require_version(self, hook: str, version: int) -> None:
        """Raise ContractError unless `version` is the one held."""
        if version != self.weight_version:
            raise spi.ContractError(
                f"{hook}: found weight version {version} in the request; expected {self.weight_version}, the one held"
            )

    def check_bounds(self, metrics: Mapping[str, float], bounds: Mapping[str, float]) -> None:
        """Raise BoundError where a metric that the loss reports exceeds its bound."""
        exceeded = {name: value for name, value in metrics.items() if value > bounds.get(name, inf)}
        if exceeded:
            shown = ", ".join(f"{name} {value:.6g}; expected at most {bounds[name]:.6g}" for name, value in exceeded.items())
            raise spi.BoundError(f"train_step: found {shown}. State kept", exceeded)

    def evaluate(self, weights: Weights, batch: spi.TokenBatch, temperature: float) -> tuple[Float64Array, Float64Array]:
        """Log-probabilities and entropies of a batch, float64 [T] each."""
        if self.config.instant:
            later = np.ones(batch.num_tokens)
            later[batch.offsets[:-1]] = 0.0
            uniform = np.log(self.config.vocab_size)
            return -uniform * later, uniform * later
        forward = self.forward(weights, batch, temperature)
        return forward.logprobs(), forward.entropy()

    def forward(self, weights: Weights, batch: spi.TokenBatch, temperature: float) -> Forward:
        """The policy after every context of a batch."""
        contexts = Contexts.of(batch.tokens, batch.offsets, self.config.vocab_size, batch.sampling_mask)
        return Forward.of(weights, contexts, temperature)

    def values(self, batch: spi.TokenBatch) -> ValueForward:
        """The values after every token of a batch."""
        return ValueForward.of(self.weights, batch.tokens, batch.offsets)

    def accumulate(
        self, request: spi.TrainStepRequest | spi.ForwardBackwardRequest
    ) -> tuple[float, dict[str, float], dict[str, Float64Array]]:
        """Loss, metrics and gradients added up over the microbatches."""
        if self.config.instant:
            mismatch = dict(zip(spi.MISMATCH_METRICS, (1.0, 0.0, 1.0), strict=True))
            return 0.0, mismatch if request.loss.generation_mismatch else {}, {}
        total = 0.0
        sums: dict[str, float] = {}
        maxima: dict[str, float] = {}
        grads = {name: np.zeros(value.shape) for name, value in self.weights.items()}
        for batch in request.microbatches:
            forward: Forward | ValueForward
            if self.context.head == "value":
                forward = self.values(batch)
            else:
                forward = self.forward(self.weights, batch, request.temperature)
            output = self.call_loss(request, batch, forward)
            loss: Any = output.loss
            with np.errstate(invalid="ignore"):  # a loss may be infinite; train_step then refuses what comes of it
                if isinstance(forward, ValueForward):
                    parts = forward.gradients(self.weights, loss.value_grads)
                else:
                    with_entropy = request.loss.entropy == "loss" and loss.entropy_grads is not None
                    entropy_grads = loss.entropy_grads if with_entropy else np.zeros(batch.num_tokens)
                    parts = forward.gradients(self.weights, loss.logprob_grads, entropy_grads)
            for name, grad in parts.items():
                grads[name] += grad
            total += loss.value
            for name, value in output.sums.items():
                sums[name] = sums.get(name, 0.0) + float(value)
            for name, value in output.maxima.items():
                maxima[name] = max(maxima.get(name, -np.inf), float(value))
        return self.reduced(total, sums, maxima, grads)

    def reduced(
        self, loss: float, sums: dict[str, float], maxima: dict[str, float], grads: dict[str, Float64Array]
    ) -> tuple[float, dict[str, float], dict[str, Float64Array]]:
        """Loss, metrics and gradients of all ranks: of this one, since there is no other."""
        return loss, sums | maxima, grads

    def call_loss(
        self,
        request: spi.TrainStepRequest | spi.ForwardBackwardRequest,
        batch: spi.TokenBatch,
        forward: Forward | ValueForward,
    ) -> spi.LossOutput:
        """Call the loss that the request names."""
        values = forward.values() if isinstance(forward, ValueForward) else None
        current = np.zeros(batch.num_tokens) if isinstance(forward, ValueForward) else forward.logprobs()
        fields: dict[str, Any] = {
            "logprobs": current,
            "values": values,
            "entropy": forward.entropy() if isinstance(forward, Forward) and request.loss.entropy != "none" else None,
            "loss_mask": batch.loss_mask,
            "offsets": batch.offsets,
            "token_columns": batch.token_columns,
            "sequence_columns": batch.sequence_columns,
            "counts": request.counts,
            "previous_logprobs": request.loss.previous_of(batch.token_columns, current),
        }
        function = pkgutil.resolve_name(request.loss.path)
        output: spi.LossOutput = function(spi.LossInputs(**fields), request.loss.config)
        if not request.loss.generation_mismatch:
            return output
        return evolve(output, sums={**output.sums, **self.mismatch(batch, current, request.counts)})

    def mismatch(self, batch: spi.TokenBatch, current: Float64Array, counts: spi.GlobalCounts) -> dict[str, Any]:
        """MISMATCH_METRICS of a microbatch, each its part of the mean over the step's loss tokens."""
        delta = (current - batch.token_columns[spi.GENERATION_LOGPROBS])[batch.loss_mask]
        near = delta.clip(-50.0, 50.0)
        with np.errstate(over="ignore"):
            ratio = np.exp(delta)
        values = np.exp(np.abs(near)), np.expm1(near) - near, np.where(np.isfinite(ratio), ratio, 0.0)
        return {name: value.sum() / counts.num_loss_tokens for name, value in zip(spi.MISMATCH_METRICS, values, strict=True)}

    def step_logprobs(self, request: spi.TrainStepRequest | spi.ForwardBackwardRequest) -> tuple[Float32Array, ...]:
        """Return the log-probabilities that the loss got, float32 [T] each."""
        both = (self.evaluate(self.weights, batch, request.temperature) for batch in request.microbatches)
        return tuple(logprobs.astype(np.float32) for logprobs, _ in both)

    def update(
        self, request: spi.TrainStepRequest | spi.OptimStepRequest, grads: dict[str, Float64Array], norm: float
    ) -> dict[str, Any]:
        """Apply the gradients, whose global L2 norm is given. Return the result's fields that both kinds of steps have."""
        self.schedule_step = request.schedule_step
        rate = self.learning_rate()
        if not self.config.instant:
            self.apply_gradients(grads, norm)
        self.weight_version += 1
        norms = {name: norm_of({name: grad}) for name, grad in grads.items()} if request.gradient_norms else None
        return {"weight_version": self.weight_version, "grad_norm": norm, "learning_rate": rate, "gradient_norms": norms}

    def learning_rate(self) -> float:
        """The learning rate of the step under way."""
        given = None if self.given is None else self.given.learning_rate
        return self.context.learning_rate(self.schedule_step) if given is None else given

    def step_optimizer(self) -> spi.OptimizerSpec:
        """The settings of the step under way."""
        names = ("betas", "eps", "weight_decay", "max_grad_norm")
        given = {name: value for name in names if (value := getattr(self.given, name, None)) is not None}
        return evolve(self.context.optimizer, **given)

    def apply_gradients(self, grads: dict[str, Float64Array], norm: float) -> None:
        """Clip, then change the weights in place by AdamW, arXiv:1711.05101, algorithm 2. All tables are matrices."""
        spec, rate = self.step_optimizer(), self.learning_rate()
        (beta1, beta2), limit = spec.betas, spec.max_grad_norm
        scale = limit / norm if 0.0 < limit < norm else 1.0
        self.num_updates += 1
        for name, grad in grads.items():
            first, second = self.moments[name]
            first = beta1 * first + (1 - beta1) * scale * grad
            second = beta2 * second + (1 - beta2) * (scale * grad) ** 2
            self.moments[name] = (first, second)
            corrected = np.sqrt(second / (1 - beta2**self.num_updates)) + spec.eps
            update = first / (1 - beta1**self.num_updates) / corrected + spec.weight_decay * self.weights[name]
            self.weights[name] -= (rate * update).astype(np.float32)


def norm_of(grads: Mapping[str, Float64Array]) -> float:
    """The global L2 norm."""
    return sqrt(sum(float((grad**2).sum()) for grad in grads.values()))


def cut_into_buckets(tensors: Weights, max_bucket_bytes: int) -> Iterator[spi.WeightBucket]:
    """Buckets of whole tensors, at most `max_bucket_bytes` each, or one tensor that is larger."""
    held: list[spi.NamedTensor] = []
    size = 0
    for name, tensor in tensors.items():
        if held and size + tensor.nbytes > max_bucket_bytes:
            yield spi.WeightBucket(tensors=tuple(held))
            held, size = [], 0
        held.append(spi.NamedTensor(name=name, tensor=tensor, digest=spi.tensor_digest(tensor)))
        size += tensor.nbytes
    if held:
        yield spi.WeightBucket(tensors=tuple(held))
