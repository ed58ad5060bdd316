"""The trainer's hooks: what each request checks, does and returns."""

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from attrs import evolve
from torch import Tensor, nn

from rlcore import spi
from rlcore_fsdp2 import checkpoint
from rlcore_fsdp2.adapters import Adapters, trained
from rlcore_fsdp2.adapters_together import AdaptersTogether, divides_by_turns, goes_by_turns
from rlcore_fsdp2.config import Fsdp2Config
from rlcore_fsdp2.export import exported_tensors, whole
from rlcore_fsdp2.gradient_norms import gradient_norms
from rlcore_fsdp2.gradients import accumulate, non_finite_names, reduce, reduces_every_microbatch
from rlcore_fsdp2.layout import Meshes, ParallelLayout
from rlcore_fsdp2.loaded_layout_check import check_layout
from rlcore_fsdp2.logprobs import compute_logprobs, compute_values
from rlcore_fsdp2.optimizer import clip, make_optimizer
from rlcore_fsdp2.parked_adapter import ParkedAdapter
from rlcore_fsdp2.policy import make_adapted_policy, make_policy, make_reference, make_working_copy
from rlcore_fsdp2.routing_replay import attach
from rlcore_fsdp2.sharding import local
from rlcore_torchkit.adapters.peft_directory import load_reference, save_reference
from rlcore_torchkit.architectures.decoders import is_described
from rlcore_torchkit.distributed import process_group
from rlcore_torchkit.distributed.device import use_device
from rlcore_torchkit.distributed.residency import Residency, num_bytes, reserved_bytes
from rlcore_torchkit.forward.image_forward import check_images
from rlcore_torchkit.huggingface.models import dims_of
from rlcore_torchkit.layers.routing_replay import check_routing
from rlcore_torchkit.optimizer.settings import step_settings
from rlcore_torchkit.refit.shard_sender import ShardSender
from rlcore_torchkit.trainer.float64 import arithmetic_of
from rlcore_torchkit.trainer.losses import DeferredErrors, Totals, no_losses, total
from rlcore_torchkit.trainer.microbatch import Microbatch, move
from rlcore_torchkit.trainer.step_stats import check_bounds, check_finite, check_state
from rlcore_torchkit.trainer.trainer_hooks import requested_model, save_state


class Fsdp2Backend:
    """Trains a Hugging Face causal language model under FSDP2."""

    def __init__(self, context: spi.TrainerContext, config: Fsdp2Config) -> None:
        rank_info = context.rank_info
        check_layout(context, config)
        self._parallel = ParallelLayout.of(config, rank_info.rank, rank_info.world_size)
        self.layout = self._parallel.data
        self._context, self._config = context, config
        self._arithmetic = partial(arithmetic_of, context.model)
        self.device = use_device(rank_info)
        # A model that is whole on its only rank gains nothing from FSDP but copies of its parameters.
        self._is_sharded = rank_info.world_size > 1 or config.cpu_offload
        if not self._is_sharded:
            with self._arithmetic():
                self._build(context, config, None)
            return
        process_group.join(rank_info, config.collective_timeout_s)
        try:
            with self._arithmetic():
                self._build(context, config, self._parallel.meshes(rank_info.device))
        except BaseException:
            process_group.leave()
            raise

    def _build(self, context: spi.TrainerContext, config: Fsdp2Config, meshes: Meshes | None) -> None:
        self.adapters: Adapters | None = None
        if not context.needs_policy:
            self.policy, self._exporter = make_reference(context.model, config, meshes, self.device), None
        elif context.lora is None:
            self.policy, self._exporter = make_policy(context.model, config, meshes, self.device, context.head)
        else:
            self.policy, self._exporter, self.adapters = make_adapted_policy(context, config, meshes, self.device)
        self._dims = dims_of(self.policy.config) if is_described(self.policy) else None
        self._working = None
        is_trained = context.needs_policy and self.adapters is None
        if not self._is_sharded and context.model.dtype in ("bfloat16", "float16") and is_trained:
            self._working = make_working_copy(context.model, config, self.policy, self.device, context.head)
        self._computing = self.policy if self._working is None else self._working.model
        self._reference = None if context.needs_policy else self.policy
        if self._reference is None and context.needs_reference and (self.adapters is None or context.reference is not None):
            self._reference = make_reference(context.reference or context.model, config, meshes, self.device)
        self._replay = attach(self._computing, meshes.context_group if meshes is not None else None)
        self._optimizer = None
        if self._exporter is not None:
            self._optimizer = make_optimizer(self.policy, self._exporter.exported, context.optimizer, self.device)
        self._reduces_every_microbatch = False
        if self._optimizer is not None:
            memory = torch.cuda.get_device_properties(self.device).total_memory if self.device.type == "cuda" else None
            parameters = trained(self.policy).values()
            self._reduces_every_microbatch = reduces_every_microbatch(config.reduce_every_microbatch, parameters, memory)
        self._residency = Residency(self.device)
        self._shard_sender = ShardSender(context.rank_info.rank, context.rank_info.world_size, self.device)
        self._weight_version = 0
        self._adapter = ""
        self._parked: dict[str, ParkedAdapter] = {}
        self._num_accumulated = 0
        """Microbatches whose gradients are held."""
        self._failed_midway = False

    @spi.hookimpl
    def train_step(self, request: spi.TrainStepRequest) -> spi.TrainStepResult:
        self._check("train_step", request.weight_version)
        check_images(request.microbatches, self.policy)
        check_routing(request.microbatches, self._dims)
        self._drop_gradients()
        try:
            logprobs: list[Tensor] = []
            totals = self._accumulate(request, logprobs)
            gradients = self._gradients()
            stats = reduce(totals, list(gradients.values()), self._parallel)
            routing = self._replay.metrics(request.microbatches, self.device, self._parallel.world_size)
            stats = evolve(stats, metrics=stats.metrics | routing)
            check_finite(stats, self._weight_version, lambda: non_finite_names(gradients, self._parallel.world_size))
            check_bounds(stats, request.bounds, self._weight_version)
            norms = self._gradient_norms(request)
            rate = self.update(list(gradients.values()), stats.grad_norm, request.schedule_step)
        finally:
            self._drop_gradients()
        self._weight_version += 1
        arrays = tuple(found.cpu().numpy() for found in logprobs) if request.logprobs else None
        return stats.result(weight_version=self._weight_version, learning_rate=rate, logprobs=arrays, gradient_norms=norms)

    @spi.hookimpl
    def forward_backward(self, request: spi.ForwardBackwardRequest) -> spi.ForwardBackwardResult:
        self._check("forward_backward", request.weight_version)
        check_images(request.microbatches, self.policy)
        check_routing(request.microbatches, self._dims)
        if request.piece == 0:
            self._drop_gradients()
        try:
            logprobs: list[Tensor] = []
            stats = reduce(self._accumulate(request, logprobs), (), self._parallel)
            routing = self._replay.metrics(request.microbatches, self.device, self._parallel.world_size)
            stats = evolve(stats, metrics=stats.metrics | routing)
            check_finite(stats, self._weight_version, hook="forward_backward")
        except BaseException:
            self._drop_gradients()
            raise
        self._num_accumulated += len(request.microbatches)
        arrays = tuple(found.cpu().numpy() for found in logprobs) if request.logprobs else None
        return spi.ForwardBackwardResult(
            loss=stats.loss, metrics=stats.metrics, logprobs=arrays, weight_version=self._weight_version
        )

    @spi.hookimpl
    def optim_step(self, request: spi.OptimStepRequest) -> spi.OptimStepResult:
        self._check("optim_step", request.weight_version)
        gradients = self._gradients()
        try:
            stats = reduce(no_losses(self.device), list(gradients.values()), self._parallel)
            names = partial(non_finite_names, gradients, self._parallel.world_size)
            check_finite(stats, self._weight_version, names, hook="optim_step")
            norms = self._gradient_norms(request)
            rate = self.update(list(gradients.values()), stats.grad_norm, request.schedule_step, request)
        finally:
            self._drop_gradients()
        self._weight_version += 1
        figures = {"grad_norm": stats.grad_norm, "learning_rate": rate, "gradient_norms": norms}
        return spi.OptimStepResult(weight_version=self._weight_version, **figures)

    @spi.hookimpl
    def use_adapter(self, request: spi.UseAdapterRequest) -> spi.UseAdapterResult:
        self._check("use_adapter", self._weight_version)
        adapters = self._require_adapters("use_adapter")
        for name in request.drops:
            self._parked.pop(name, None)
        if request.name != self._adapter:
            if self._adapter not in request.drops:
                self._parked[self._adapter] = self._park(adapters)
            self._adapter = request.name
            if request.seed is None:
                self._unpark(adapters, self._parked.pop(request.name))
            self._parked.pop(request.name, None)
        if request.seed is not None:
            self._drop_gradients()
            self._optimizer.state.clear()
            adapters.seed, adapters.rank = request.seed, request.rank or adapters.spec.rank
            adapters.initialise(self.policy)
            self._weight_version = 0
        return spi.UseAdapterResult(weight_version=self._weight_version)

    def _park(self, adapters: Adapters) -> ParkedAdapter:
        return ParkedAdapter.take(self.policy, self._optimizer, adapters, self._weight_version, self._num_accumulated)

    def _unpark(self, adapters: Adapters, parked: ParkedAdapter) -> None:
        parked.put(self.policy, self._optimizer, adapters)
        self._weight_version, self._num_accumulated = parked.weight_version, parked.num_accumulated

    def _require_adapters(self, hook: str) -> Adapters:
        if self.adapters is None:
            raise spi.ContractError(f"{hook}: found a trainer of whole weights; expected context.lora")
        return self.adapters

    @spi.hookimpl
    def forward_backward_together(self, request: spi.ForwardBackwardTogetherRequest) -> spi.ForwardBackwardTogetherResult:
        hook, pieces, used = "forward_backward_together", request.pieces, self._adapter
        self._check(hook, self._weight_version)
        adapters = self._require_adapters(hook)
        self._parked[used] = self._park(adapters)
        before = {name: self._parked[name].with_own_gradients() for name in pieces}
        try:
            turns = divides_by_turns(adapters, self._context, self._config, self._parallel)
            alone = {name: piece for name, piece in pieces.items() if turns or goes_by_turns(piece)}
            found = {name: self._in_turn(adapters, name, piece) for name, piece in alone.items()}
            shared = {name: piece for name, piece in pieces.items() if name not in alone}
            if shared:
                together = AdaptersTogether.of(self.policy, adapters, self._parallel, self.device, shared, self._parked)
                with self._arithmetic():
                    results, after = together.run(self._context.max_microbatch_tokens)
                found, self._parked = found | results, self._parked | after
        except BaseException as error:
            self._parked |= before
            self._failed_midway |= self._is_sharded and not isinstance(error, spi.NonFiniteError)
            raise
        finally:
            self._unpark(adapters, self._parked.pop(used))
        return spi.ForwardBackwardTogetherResult(pieces={name: found[name] for name in pieces})

    def _in_turn(self, adapters: Adapters, name: str, piece: spi.ForwardBackwardRequest) -> spi.ForwardBackwardResult:
        """Add a piece of an adapter while none is in use."""
        self._unpark(adapters, self._parked[name])
        try:
            return self.forward_backward(piece)
        finally:
            self._parked[name] = self._park(adapters)

    @spi.hookimpl
    def get_logprobs(self, request: spi.LogprobsRequest) -> spi.LogprobsResult:
        self._check("get_logprobs", request.weight_version)
        with self._requested(request) as model, self._arithmetic():
            check_images(request.microbatches, model)
            check_routing(request.microbatches, self._dims)
            logprobs, entropies = compute_logprobs(model, request, self.device, self._replay)
        return spi.LogprobsResult(logprobs=logprobs, entropy=entropies, weight_version=self._weight_version)

    @spi.hookimpl
    def get_values(self, request: spi.ValuesRequest) -> spi.ValuesResult:
        self._check("get_values", request.weight_version)
        check_images(request.microbatches, self.policy)
        with self._arithmetic():
            values = compute_values(self._computing, request, self.device, self._replay)
        return spi.ValuesResult(values=values, weight_version=self._weight_version)

    @spi.hookimpl
    def export_weights(self, request: spi.ExportWeightsRequest) -> spi.WeightExport:
        self._check("export_weights", request.weight_version)
        return self._export(request)

    @spi.hookimpl
    def set_residency(self, request: spi.SetResidencyRequest) -> spi.SetResidencyResult:
        self._drop_gradients()
        self._parked = {name: one.without_gradients() for name, one in self._parked.items()}
        return spi.SetResidencyResult(device_bytes=self._move(request), reserved_bytes=reserved_bytes(self.device))

    @spi.hookimpl
    def save_state(self, request: spi.SaveStateRequest) -> spi.SaveStateResult:
        with self._residency.resident(self._move):
            return save_state(
                request,
                self._context,
                self._weight_version,
                resume=self._save_resume,
                export=self._export,
                adapters=self._whole_adapters,
                rank=None if self.adapters is None else self.adapters.rank,
            )

    @spi.hookimpl
    def load_state(self, request: spi.LoadStateRequest) -> spi.LoadStateResult:
        with self._residency.resident(self._move):
            self._weight_version, rank = checkpoint.load(request.directory, self.policy, self._optimizer)
            if not request.optimizer:
                self._optimizer.state.clear()  # as before the first step
            if self.adapters is not None:
                self.adapters.rank = rank or self.adapters.spec.rank
                self.adapters.begun = load_reference(request.directory)
            self._refresh()
        return spi.LoadStateResult(weight_version=self._weight_version)

    @spi.hookimpl
    def close(self, request: spi.CloseRequest) -> None:  # noqa: ARG002
        for model in self._models():
            del model.forward  # refers to the model, as what patch_head sets does
        self._shard_sender.close()
        refers_to_itself = self._is_sharded or self._working is not None or self._config.compile_layers
        del (
            self.policy,
            self.adapters,
            self._working,
            self._computing,
            self._reference,
            self._optimizer,
            self._exporter,
            self._residency,
        )
        del self._replay
        if refers_to_itself:
            gc.collect()  # as FSDP's records, gradient hooks and compiled layers do
        if self._is_sharded:
            process_group.leave()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _check(self, hook: str, weight_version: int) -> None:
        check_state(hook, weight_version, self._weight_version, failed_midway=self._failed_midway)

    @contextmanager
    def _requested(self, request: spi.LogprobsRequest) -> Iterator[nn.Module]:
        """The model that is asked for: as a reference, with adapters, the policy's beginning."""
        is_own = self._context.needs_reference and self._context.reference is None
        if self.adapters is None or not is_own or request.model == "policy":
            yield requested_model(request, self._computing, self._reference)
            return
        with self.adapters.as_begun(self.policy):
            yield self.policy

    def _whole_adapters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in trained(self.policy).items():
            yield name, whole(parameter.detach(), parameter.dtype, self.device)

    def _gradients(self) -> dict[str, Tensor]:
        """The gradients held, by the names of their parameters."""
        return {name: p.grad for name, p in trained(self.policy).items() if p.grad is not None}

    def _gradient_norms(self, request: spi.TrainStepRequest | spi.OptimStepRequest) -> dict[str, float] | None:
        return gradient_norms(self.policy, self._exporter, self.device, self._parallel) if request.gradient_norms else None

    def _drop_gradients(self) -> None:
        self._num_accumulated = 0
        if self._optimizer is not None:
            self._optimizer.zero_grad()

    def _accumulate(self, request: spi.TrainStepRequest | spi.ForwardBackwardRequest, logprobs: list[Tensor]) -> Totals:
        microbatches = [move(batch, self.device, request.loss.token_columns) for batch in request.microbatches]
        self._replay.begin()
        errors = DeferredErrors()
        try:
            with self._arithmetic():
                outputs = accumulate(
                    self._computing,
                    microbatches,
                    request.loss,
                    request.counts,
                    request.temperature,
                    errors,
                    reduce_every_microbatch=self._reduces_every_microbatch,
                    prepare=partial(self._prepare, request.weight_version),
                    logprobs=logprobs if request.logprobs else None,
                )
        except BaseException:
            self._failed_midway = self._is_sharded  # FSDP still holds unreduced gradients of the microbatches before
            raise
        finally:
            if self.adapters is not None:
                self.adapters.train_off()
        errors.raise_first()
        return total(outputs)

    def _prepare(self, version: int, index: int, microbatch: Microbatch) -> None:
        """Before a microbatch of a step: where its tokens go, and what adapters drop of them. Ranks that have the same tokens
        drop the same."""
        self._replay.use(microbatch)
        if self.adapters is not None:
            place = self.layout.data_parallel_rank, self._parallel.context_rank
            self.adapters.train_on(len(microbatch.tokens), version, *place, self._num_accumulated + index)

    def update(
        self, gradients: Sequence[Tensor], norm: float, schedule_step: int, given: spi.OptimStepRequest | None = None
    ) -> float:
        """Clip and step, with the settings that `given` names; returns the learning rate used."""
        settings = step_settings(self._context, schedule_step, given)
        clip(gradients, norm, settings.max_grad_norm)
        self._optimizer.step(settings.share, settings.overrides)
        self._refresh()
        return settings.learning_rate

    def _refresh(self) -> None:
        if self._working is not None:
            self._working.refresh()

    def _export(self, request: spi.ExportWeightsRequest) -> spi.WeightExport:
        is_narrow = self._working is not None and request.dtype == self._context.model.dtype
        parameters = exported_tensors(self._computing if is_narrow else self.policy)
        if request.sharded:
            return self._exporter.shard(request, parameters, self._shard_sender, self.device)
        return self._exporter.export(request, parameters, self.device)

    def _models(self) -> list[nn.Module]:
        models = [self.policy, *([] if self._working is None else [self._working.model])]
        return models if self._reference in (None, self.policy) else [*models, self._reference]

    def _move(self, request: spi.SetResidencyRequest) -> int:
        """Bytes left on the device."""
        parked = self._parked.values()
        weights = self._on_device(parameter for model in self._models() for parameter in model.parameters())
        weights += self._on_device(tensor for one in parked for tensor in one.weights.values())
        states = [] if self._optimizer is None else [*self._optimizer.state.values()]
        states += [moments for one in parked for moments in one.moments.values()]
        state = self._on_device(tensor for state in states for tensor in state.values())
        self._residency.move(request, weights, state)
        return num_bytes([*weights, *state])

    def _on_device(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The tensors that are on the device: step counts, and what `cpu_offload` keeps, are on the host."""
        return [tensor for tensor in tensors if local(tensor).device.type == self.device.type]

    def _save_resume(self, directory: Path) -> tuple[str, ...]:
        state = self.policy, self._optimizer, self._weight_version, None if self.adapters is None else self.adapters.rank
        files = checkpoint.save(directory, self._context.rank_info, *state)
        begun = None if self.adapters is None or self._context.rank_info.rank else self.adapters.begun
        return files if begun is None else (*files, *save_reference(directory, begun))
