"""The trainer's hooks: what each request checks, does and returns."""

import gc
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from rlcore.spi import (
    CloseRequest,
    CloseResult,
    ContractError,
    ExportWeightsRequest,
    LoadStateRequest,
    LoadStateResult,
    LogprobsRequest,
    LogprobsResult,
    NonFiniteError,
    SaveStateRequest,
    SaveStateResult,
    SetResidencyRequest,
    SetResidencyResult,
    TrainerContext,
    TrainerLayout,
    TrainStepRequest,
    TrainStepResult,
    WeightExport,
    hookimpl,
)
from rlcore.torchkit.hf_directory import write_hf_directory
from rlcore_fsdp2 import checkpoint, process_group
from rlcore_fsdp2.config import Fsdp2Config
from rlcore_fsdp2.gradients import Figures, Totals, accumulate, non_finite_names, reduce
from rlcore_fsdp2.logprobs import compute_logprobs
from rlcore_fsdp2.microbatch import move
from rlcore_fsdp2.optimizer import clip, make_optimizer
from rlcore_fsdp2.policy import make_policy, make_reference
from rlcore_fsdp2.residency import Residency, num_bytes
from rlcore_fsdp2.schedule import learning_rate
from rlcore_fsdp2.sharding import reshard

HF_BUCKET_BYTES = 2**28
MAX_NAMED = 3


class Fsdp2Backend:
    """Trains a Hugging Face causal language model under FSDP2."""

    def __init__(self, context: TrainerContext, config: Fsdp2Config) -> None:
        place = context.place
        self.layout = TrainerLayout(data_parallel_rank=place.rank, data_parallel_size=place.world_size)
        self._context, self._config = context, config
        self._device = torch.device("cuda", place.local_rank) if place.device == "cuda" else torch.device("cpu")
        # A whole float32 model gains nothing from FSDP but copies of its parameters.
        self._is_sharded = place.world_size > 1 or context.model.dtype != "float32"
        mesh = None
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        if self._is_sharded:
            process_group.join(place, config.collective_timeout_s)
            mesh = init_device_mesh(place.device, (place.world_size,))
        self._policy, self._exporter = make_policy(context.model, config, mesh, self._device)
        self._reference = make_reference(context.model, config, mesh, self._device) if context.needs_reference else None
        self._optimizer = make_optimizer(self._policy, config.optimizer)
        self._residency = Residency()
        self._weight_version = 0
        self._failed_midway = False

    @hookimpl
    def train_step(self, request: TrainStepRequest) -> TrainStepResult:
        self._check(request.weight_version, "train_step", state=True)
        try:
            totals = self._accumulate(request)
            gradients = {name: p.grad for name, p in self._policy.named_parameters() if p.grad is not None}
            figures = reduce(totals, list(gradients.values()), self.layout.data_parallel_size)
            self._check_finite(figures, gradients)
            rate = self._update(list(gradients.values()), figures.grad_norm)
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        self._weight_version += 1
        return TrainStepResult(
            weight_version=self._weight_version,
            loss=figures.loss,
            grad_norm=figures.grad_norm,
            learning_rate=rate,
            metrics=figures.metrics,
        )

    @hookimpl
    def get_logprobs(self, request: LogprobsRequest) -> LogprobsResult:
        self._check(request.weight_version, "get_logprobs", state=False)
        model = self._policy if request.model == "policy" else self._reference
        if model is None:
            raise ContractError("get_logprobs: found no reference policy; expected needs_reference in the trainer's context")
        logprobs, entropies = compute_logprobs(model, request, self._device)
        return LogprobsResult(logprobs=logprobs, entropy=entropies, weight_version=self._weight_version)

    @hookimpl
    def export_weights(self, request: ExportWeightsRequest) -> WeightExport:
        self._check(request.weight_version, "export_weights", state=False)
        return self._exporter.export(request, self.layout.data_parallel_size)

    @hookimpl
    def set_residency(self, request: SetResidencyRequest) -> SetResidencyResult:
        weights, state = self._weights(), self._state()
        self._residency.move(request, self._device, weights, state)
        return SetResidencyResult(device_bytes=num_bytes([*weights, *state]))

    @hookimpl
    def save_state(self, request: SaveStateRequest) -> SaveStateResult:
        self._residency.require("save_state", state=request.kind == "resume")
        if request.kind == "hf":
            return SaveStateResult(files=self._save_hf(request))
        place = checkpoint.Writer(rank=self._context.place.rank, world_size=self._context.place.world_size)
        files = checkpoint.save(request.directory, place, self._policy, self._optimizer, self._weight_version)
        return SaveStateResult(files=tuple(files))

    @hookimpl
    def load_state(self, request: LoadStateRequest) -> LoadStateResult:
        self._residency.require("load_state", state=True)
        self._weight_version = checkpoint.load(request.directory, self._policy, self._optimizer)
        return LoadStateResult(weight_version=self._weight_version)

    @hookimpl
    def close(self, request: CloseRequest) -> CloseResult:  # noqa: ARG002
        del self._policy, self._reference, self._optimizer, self._exporter, self._residency
        gc.collect()  # modules and their patched forward refer to each other
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        if self._is_sharded:
            process_group.leave()
        return CloseResult()

    def _check(self, weight_version: int, hook: str, *, state: bool) -> None:
        if weight_version != self._weight_version:
            raise ContractError(f"{hook}: found weight_version {weight_version}; expected {self._weight_version}, the one held")
        if self._failed_midway:
            raise ContractError(f"{hook}: an earlier train_step failed between microbatches; build the trainer anew")
        self._residency.require(hook, state=state)

    def _accumulate(self, request: TrainStepRequest) -> Totals:
        microbatches = [move(batch, self._device, request.loss.token_columns) for batch in request.microbatches]
        try:
            return accumulate(
                self._policy,
                microbatches,
                request.loss,
                request.counts,
                request.temperature,
                reduce_every_microbatch=self._config.reduce_every_microbatch,
            )
        except BaseException:
            self._failed_midway = self._is_sharded  # FSDP still holds unreduced gradients of the microbatches before
            raise

    def _check_finite(self, figures: Figures, gradients: Mapping[str, Tensor]) -> None:
        """Every rank sees the same figures, so all of them raise."""
        where = f"train_step at weight version {self._weight_version}"
        if not math.isfinite(figures.loss):
            raise NonFiniteError(f"{where}: the loss is {figures.loss}; the step is refused and the state before it kept")
        if not math.isfinite(figures.grad_norm):
            names = non_finite_names(gradients, self.layout.data_parallel_size)
            of = f" in {', '.join(names[:MAX_NAMED])}" + (f" and {len(names) - MAX_NAMED} more" if names[MAX_NAMED:] else "")
            raise NonFiniteError(
                f"{where}: the gradient's norm is {figures.grad_norm}, not finite{of if names else ''}; "
                "the step is refused and the state before it kept"
            )

    def _update(self, gradients: Sequence[Tensor], norm: float) -> float:
        """Clip and step; returns the learning rate used."""
        options = self._config.optimizer
        clip(gradients, norm, options.max_grad_norm)
        rate = learning_rate(options.learning_rate, self._config.schedule, self._weight_version, self._context.num_train_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        return rate

    def _weights(self) -> list[Tensor]:
        models = [self._policy] if self._reference is None else [self._policy, self._reference]
        for model in models:
            reshard(model)
        return [parameter for model in models for parameter in model.parameters()]

    def _state(self) -> list[Tensor]:
        return [tensor for state in self._optimizer.state.values() for tensor in state.values()]

    def _save_hf(self, request: SaveStateRequest) -> tuple[str, ...]:
        model = self._context.model
        export = self._exporter.export(
            ExportWeightsRequest(weight_version=self._weight_version, dtype=model.dtype, max_bucket_bytes=HF_BUCKET_BYTES),
            self.layout.data_parallel_size,
        )
        if self._context.place.rank == 0:
            return write_hf_directory(export, model.path, request.directory, model.dtype, revision=model.revision)
        for _ in export.buckets:
            pass  # takes part in gathering what rank 0 writes
        return ()
