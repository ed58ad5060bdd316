"""Trainer `mlx`: one device, the whole batch's gradient in float32, AdamW."""

from pathlib import Path

import mlx.core as mx
import numpy as np

from rlcore import spi
from rlcore.files import storage_errors
from rlcore_mlx.decoder import Decoder, Weights, cast
from rlcore_mlx.directory import load_weights, save_tensors, save_weights
from rlcore_mlx.export import make_buckets
from rlcore_mlx.figures import token_figures
from rlcore_mlx.gradients import StepGradients
from rlcore_mlx.optimizer import AdamW, global_norm
from rlcore_mlx.provider import MlxTrainerConfig
from rlcore_torchkit.trainer.loss_gradients import total_loss
from rlcore_torchkit.trainer.step_stats import StepStats, check_bounds, check_finite, check_state
from rlcore_torchkit.trainer.trainer_hooks import check_same_shapes, requested_model

STATE_FILE = "mlx.safetensors"


class MlxTrainer:
    """MLX's arrays are never written to: a step makes new weights, and the reference goes on holding the first ones."""

    def __init__(self, context: spi.TrainerContext, config: MlxTrainerConfig) -> None:
        self.layout, self.version = spi.TrainerLayout(), 0
        self.context, self.config = context, config
        self.decoder = Decoder.of(context.model)
        self.weights: Weights = load_weights(self.decoder, context.model, "float32")
        self.optimizer = AdamW(context.optimizer, self.weights)
        self.reference: tuple[Decoder, Weights] | None = None
        if context.needs_reference:
            self.reference = self.policy()
        if context.reference is not None:
            decoder = Decoder.of(context.reference)
            self.reference = decoder, load_weights(decoder, context.reference, context.reference.dtype)

    @spi.hookimpl
    def train_step(self, request: spi.TrainStepRequest) -> spi.TrainStepResult:
        self.require("train_step", request.weight_version)
        step = StepGradients(request, self.decoder, self.context.model.dtype, self.config.max_chunk_logits)
        for batch in request.microbatches:
            step.add(self.weights, batch)
        loss, metrics = total_loss(step.losses)
        stats = StepStats(loss=loss, grad_norm=global_norm(step.gradients), metrics=metrics)
        check_finite(
            stats, self.version, lambda: [name for name, each in step.gradients.items() if not mx.isfinite(each).all()]
        )
        check_bounds(stats, request.bounds, self.version)
        rate = self.context.learning_rate(request.schedule_step)
        self.weights = self.optimizer.update(self.weights, step.gradients, stats.grad_norm, rate, self.version + 1)
        self.version += 1
        logprobs = tuple(step.logprobs) if request.logprobs else None
        return stats.result(weight_version=self.version, learning_rate=rate, logprobs=logprobs)

    @spi.hookimpl
    def get_logprobs(self, request: spi.LogprobsRequest) -> spi.LogprobsResult:
        self.require("get_logprobs", request.weight_version)
        asked = requested_model(request, self.policy(), self.reference)
        found = []
        for batch in request.microbatches:
            figures = token_figures(*asked, batch, request.temperature, self.config.max_chunk_logits)
            found.append([np.array(each) for each in figures[: 1 + request.entropy]])
        logprobs, *entropy = zip(*found, strict=True)
        return spi.LogprobsResult(logprobs=logprobs, entropy=entropy[0] if entropy else None, weight_version=self.version)

    @spi.hookimpl
    def export_weights(self, request: spi.ExportWeightsRequest) -> spi.WeightExport:
        self.require("export_weights", request.weight_version)
        shapes = self.decoder.shapes()
        specs = tuple(spi.TensorSpec(name=name, shape=shape, dtype=request.dtype) for name, shape in shapes.items())
        buckets = make_buckets(self.weights, request.dtype, request.max_bucket_bytes)
        return spi.WeightExport(weight_version=self.version, specs=specs, buckets=buckets, persistent=False)

    @spi.hookimpl
    def set_residency(self, request: spi.SetResidencyRequest) -> spi.SetResidencyResult:  # noqa: ARG002 - one memory
        held = [*self.state().values(), *(self.reference[1].values() if self.reference else ())]
        return spi.SetResidencyResult(device_bytes=sum(tensor.nbytes for tensor in held))

    @spi.hookimpl
    def save_state(self, request: spi.SaveStateRequest) -> spi.SaveStateResult:
        if request.kind == "hf":
            return spi.SaveStateResult(files=save_weights(self.policy()[1], self.context.model, request.directory))
        with storage_errors("the trainer's state", request.directory):
            save_tensors(request.directory / STATE_FILE, self.state(), {"weight_version": str(self.version)})
        return spi.SaveStateResult(files=(STATE_FILE,))

    @spi.hookimpl
    def load_state(self, request: spi.LoadStateRequest) -> spi.LoadStateResult:
        state, self.version = read_state(request.directory / STATE_FILE, self.state())
        self.weights = {name: state[name] for name in self.weights}
        self.optimizer.first = {name: state[f"first/{name}"] for name in self.weights}
        self.optimizer.second = {name: state[f"second/{name}"] for name in self.weights}
        return spi.LoadStateResult(weight_version=self.version)

    @spi.hookimpl
    def close(self, request: spi.CloseRequest) -> None:  # noqa: ARG002 - the hook's form
        self.weights, self.reference, self.optimizer.first, self.optimizer.second = {}, None, {}, {}
        mx.clear_cache()

    def require(self, hook: str, version: int) -> None:
        check_state(hook, version, self.version, failed_midway=False)

    def policy(self) -> tuple[Decoder, Weights]:
        """The model and its weights, in the dtype that they are computed with."""
        return self.decoder, cast(self.weights, self.context.model.dtype)

    def state(self) -> dict[str, mx.array]:
        """Weights and moments by name, as a checkpoint holds them."""
        moments = {"first": self.optimizer.first, "second": self.optimizer.second}
        return {**self.weights, **{f"{kind}/{name}": each[name] for kind, each in moments.items() for name in each}}


def read_state(file: Path, like: Weights) -> tuple[Weights, int]:
    """A checkpoint's tensors, of the names and shapes of `like`, and the version of its weights; spi.CheckpointError."""
    try:
        state, metadata = mx.load(str(file), return_metadata=True)  # type: ignore[misc]
        mx.eval(state)
        version = int(metadata["weight_version"])
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        raise spi.CheckpointError(f"{file} cannot be read: {error}") from error
    check_same_shapes(file, *({name: tuple(tensor.shape) for name, tensor in each.items()} for each in (state, like)))
    return state, version
