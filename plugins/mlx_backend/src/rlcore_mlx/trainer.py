"""Trainer `mlx`: one device, the whole batch's gradient in float32, AdamW."""

from math import isfinite
from pathlib import Path

import mlx.core as mx
import numpy as np

from rlcore.files import storage_errors
from rlcore.spi import (
    BoundError,
    CheckpointError,
    CloseRequest,
    ContractError,
    ExportWeightsRequest,
    LoadStateRequest,
    LoadStateResult,
    LogprobsRequest,
    LogprobsResult,
    ModelSpec,
    NonFiniteError,
    SaveStateRequest,
    SaveStateResult,
    SetResidencyRequest,
    SetResidencyResult,
    TensorSpec,
    TrainerContext,
    TrainerLayout,
    TrainStepRequest,
    TrainStepResult,
    WeightExport,
    hookimpl,
)
from rlcore_mlx.decoder import Decoder, Weights, cast
from rlcore_mlx.directory import load_weights, save_tensors, save_weights, shape_problems
from rlcore_mlx.export import make_buckets
from rlcore_mlx.figures import TokenFigures
from rlcore_mlx.gradients import StepGradients
from rlcore_mlx.optimizer import AdamW, global_norm
from rlcore_mlx.provider import MlxTrainerConfig

STATE_FILE = "mlx.safetensors"


class MlxTrainer:
    """MLX's arrays are never written to: a step makes new weights, and the reference goes on holding the first ones."""

    def __init__(self, context: TrainerContext, config: MlxTrainerConfig) -> None:
        self.layout, self.version = TrainerLayout(), 0
        self.context, self.config = context, config
        self.decoder = Decoder.of(context.model)
        self.weights: Weights = load_weights(self.decoder, context.model, "float32")
        self.optimizer = AdamW(context.optimizer, self.weights)
        self.reference: tuple[Decoder, Weights] | None = None
        if context.needs_reference:
            self.reference = self.load_reference(context.model, context.reference)

    def load_reference(self, model: ModelSpec, other: ModelSpec | None) -> tuple[Decoder, Weights]:
        """The frozen model in its compute dtype: the policy as it is now, or another."""
        decoder = self.decoder if other is None else Decoder.of(other)
        weights = self.weights if other is None else load_weights(decoder, other, other.dtype)
        return decoder, cast(weights, (other or model).dtype)

    @hookimpl
    def train_step(self, request: TrainStepRequest) -> TrainStepResult:
        self.require(request.weight_version)
        step = StepGradients(request, self.figures(self.decoder, request.temperature), self.context.model.dtype)
        for batch in request.microbatches:
            step.add(self.weights, batch)
        loss, metrics = step.totals()
        norm = global_norm(step.gradients)
        if not isfinite(loss) or not isfinite(norm):
            raise NonFiniteError(f"the loss is {loss}, the gradient's norm {norm}; the state before the step is kept")
        exceeded = {name: metrics[name] for name, bound in request.bounds.items() if metrics.get(name, bound) > bound}
        if exceeded:
            found = ", ".join(f"{name} {value:.6g}; expected at most {request.bounds[name]:.6g}" for name, value in exceeded.items())
            raise BoundError(f"train_step: found {found}. The state before the step is kept", exceeded)
        rate = self.context.learning_rate(request.schedule_step)
        self.weights = self.optimizer.update(self.weights, step.gradients, norm, rate, self.version + 1)
        self.version += 1
        return TrainStepResult(
            weight_version=self.version,
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            metrics=metrics,
            logprobs=tuple(step.logprobs) if request.logprobs else None,
        )

    @hookimpl
    def get_logprobs(self, request: LogprobsRequest) -> LogprobsResult:
        self.require(request.weight_version)
        decoder, weights = self.policy_or_reference(request.model)
        figures = self.figures(decoder, request.temperature)
        pairs = []
        for batch in request.microbatches:
            found = figures.of(weights, batch)
            mx.eval(found if request.entropy else found[0])
            pairs.append(found)
        return LogprobsResult(
            logprobs=tuple(np.array(logprobs) for logprobs, _ in pairs),
            entropy=tuple(np.array(entropy) for _, entropy in pairs) if request.entropy else None,
            weight_version=self.version,
        )

    @hookimpl
    def export_weights(self, request: ExportWeightsRequest) -> WeightExport:
        self.require(request.weight_version)
        shapes = self.decoder.shapes()
        return WeightExport(
            weight_version=self.version,
            specs=tuple(TensorSpec(name=name, shape=shape, dtype=request.dtype) for name, shape in shapes.items()),
            buckets=make_buckets(self.weights, request.dtype, request.max_bucket_bytes),
            persistent=False,
        )

    @hookimpl
    def set_residency(self, request: SetResidencyRequest) -> SetResidencyResult:  # noqa: ARG002 - host and device are one
        reference = {} if self.reference is None else self.reference[1]
        return SetResidencyResult(device_bytes=sum(held.nbytes for held in (*self.state().values(), *reference.values())))

    @hookimpl
    def save_state(self, request: SaveStateRequest) -> SaveStateResult:
        if request.kind == "hf":
            weights = cast(self.weights, self.context.model.dtype)
            return SaveStateResult(files=save_weights(weights, self.context.model, request.directory))
        if request.kind != "resume":
            raise ContractError(f"save_state: found kind {request.kind}; expected resume or hf: there are no adapters")
        with storage_errors("the trainer's state", request.directory):
            save_tensors(request.directory / STATE_FILE, self.state(), {"weight_version": str(self.version)})
        return SaveStateResult(files=(STATE_FILE,))

    @hookimpl
    def load_state(self, request: LoadStateRequest) -> LoadStateResult:
        state, self.version = read_state(request.directory / STATE_FILE, self.state())
        self.weights = {name: state[name] for name in self.weights}
        self.optimizer.first = {name: state[f"first/{name}"] for name in self.weights}
        self.optimizer.second = {name: state[f"second/{name}"] for name in self.weights}
        return LoadStateResult(weight_version=self.version)

    @hookimpl
    def close(self, request: CloseRequest) -> None:  # noqa: ARG002 - the hook's form
        self.weights, self.reference, self.optimizer.first, self.optimizer.second = {}, None, {}, {}
        mx.clear_cache()

    def require(self, version: int) -> None:
        if version != self.version:
            raise ContractError(f"found weight version {version} in the request; expected {self.version}, the one held")

    def figures(self, decoder: Decoder, temperature: float) -> TokenFigures:
        return TokenFigures(decoder=decoder, temperature=temperature, max_chunk_logits=self.config.max_chunk_logits)

    def policy_or_reference(self, model: str) -> tuple[Decoder, Weights]:
        if model == "policy":
            return self.decoder, cast(self.weights, self.context.model.dtype)
        if self.reference is None:
            raise ContractError("get_logprobs: found a request for the reference; expected needs_reference in the context")
        return self.reference

    def state(self) -> dict[str, mx.array]:
        """Weights and moments by name, as a checkpoint holds them."""
        moments = {"first": self.optimizer.first, "second": self.optimizer.second}
        return {**self.weights, **{f"{kind}/{name}": each[name] for kind, each in moments.items() for name in each}}


def read_state(file: Path, like: Weights) -> tuple[Weights, int]:
    """A checkpoint's tensors, of the names and shapes of `like`, and the version of its weights; CheckpointError."""
    try:
        state, metadata = mx.load(str(file), return_metadata=True)  # type: ignore[misc]
        mx.eval(state)
        version = int(metadata["weight_version"])
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    found, expected = ({name: tuple(tensor.shape) for name, tensor in each.items()} for each in (state, like))
    if problems := shape_problems(found, expected):
        raise CheckpointError(f"{file} is of another model: {'; '.join(problems)}")
    return state, version
