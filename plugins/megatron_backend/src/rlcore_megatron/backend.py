"""The trainer's hooks: what each request checks, does and returns."""

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor

from rlcore import spi
from rlcore.spi.arrays import Float32Array
from rlcore_megatron.checkpoints import checkpoint
from rlcore_megatron.checkpoints.initial import load_initial
from rlcore_megatron.checks.invariance_check import OPTION
from rlcore_megatron.checks.multi_token_check import head_problems
from rlcore_megatron.checks.optimizer_check import pattern_problems
from rlcore_megatron.families.models import dims_of, find_family, load_config, standard_config
from rlcore_megatron.families.weight_mapping import Names
from rlcore_megatron.layouts import parallel
from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_megatron.layouts.layout_check import family_option_problems, layout_problems, reference_layout_problems
from rlcore_megatron.modules import auxiliary_loss
from rlcore_megatron.modules.model import PolicyModel, build, freeze_vision, read_images, release_graphs, unwrapped
from rlcore_megatron.modules.model_config import transformer_config
from rlcore_megatron.modules.routing_replay import attach
from rlcore_megatron.modules.token_dispatch import drop_float8_copies
from rlcore_megatron.setup.config import MegatronConfig, has_tensor_settings
from rlcore_megatron.setup.cpu_shim import cuda_or_cpu
from rlcore_megatron.training.gradient_norms import gradient_norms
from rlcore_megatron.training.head_gradients import HeadGradients
from rlcore_megatron.training.optimizer import Rates, distribute, make_optimizer, reduce_gradients, unreduced
from rlcore_megatron.training.parked_adapter import ParkedAdapter, clear, park, put_back
from rlcore_megatron.training.residency import MegatronResidency
from rlcore_megatron.training.tensor_optimizer import TensorOptimizer
from rlcore_megatron.training.train import Passes, reduce_totals
from rlcore_megatron.weights.adapters import as_begun, rank_of, set_rank
from rlcore_megatron.weights.adapters import attach as attach_adapters
from rlcore_megatron.weights.adapters import initialise as initialise_adapters
from rlcore_megatron.weights.export import Exporter, one_after_the_other, shard
from rlcore_torchkit.adapters.lora import Dropout
from rlcore_torchkit.adapters.peft_directory import load_reference, save_reference
from rlcore_torchkit.distributed.device import use_device
from rlcore_torchkit.distributed.residency import reserved_bytes
from rlcore_torchkit.huggingface.batch_invariance import invariant_model_problems
from rlcore_torchkit.huggingface.hf_directory import BUCKET_BYTES
from rlcore_torchkit.layers.routing_replay import check_routing
from rlcore_torchkit.optimizer.settings import NO_OVERRIDES, StepOverrides
from rlcore_torchkit.refit.shard_sender import ShardSender
from rlcore_torchkit.trainer.losses import DeferredErrors, Totals, total
from rlcore_torchkit.trainer.microbatch import Microbatch, move
from rlcore_torchkit.trainer.step_stats import StepStats, check_bounds, check_finite, check_state
from rlcore_torchkit.trainer.trainer_hooks import requested_model, save_state

MTP_GRAD_NORM = "mtp_grad_norm"
"""The metric of the norm of the multi-token head's gradients, which are clipped by themselves."""
logger = logging.getLogger(__name__)


class MegatronBackend:
    """Trains a Hugging Face causal language model in Megatron-Core."""

    def __init__(self, context: spi.TrainerContext, config: MegatronConfig) -> None:
        rank_info = context.rank_info
        if (context.lora is not None or config.mtp) and not config.transformer_engine:
            config = evolve(config, transformer_engine=False)
        self._context, self._config = context, config
        self._device = use_device(rank_info)
        self._hf = load_config(context.model, context.head)
        self._dims = dims_of(self._hf)
        reference = load_config(context.reference) if context.needs_reference and context.reference is not None else self._hf
        self._parallel = _layout(context, config, standard_config(self._hf), standard_config(reference))
        if self._parallel.reason and rank_info.rank == 0:
            logger.info("%s", self._parallel.reason)
        self.layout = self._parallel.data_layout
        self._shard_sender = ShardSender(rank_info.rank, rank_info.world_size, self._device)
        self._parked: dict[str, ParkedAdapter] = {}
        with cuda_or_cpu(self._device.type):
            parallel.join(rank_info, self._parallel, config.collective_timeout_s)
            try:
                self._groups = parallel.Groups.current()
                self._build() if context.needs_policy else self._build_reference_alone()
            except BaseException:
                parallel.leave()
                raise
        self.weight_version = 0
        self._adapter, self._seed = "", context.seed
        self._num_accumulated = 0
        """Microbatches whose gradients are held."""
        self._failed_midway = False

    def _build(self) -> None:
        context, config, layout = self._context, self._config, self._parallel
        transformer = transformer_config(self._hf, config, layout, context.model.dtype, self._device.type)
        policy = build(transformer, self._hf, layout, context.head, mtp=config.mtp, invariant_parts=self._invariant_parts)
        read_images(policy, self._hf, context.model)
        if config.freeze == "vision":
            freeze_vision(policy)
        attach(policy)
        auxiliary_loss.watch(policy)
        load_initial(policy, self._hf, context.model, config, layout, context.head, mtp=config.mtp)
        adapters, self._begun = (None, None) if context.lora is None else attach_adapters(policy, self._hf, context, layout)
        self.models = distribute(policy, config, transformer, self._device.type)
        self.optimizer = make_optimizer(self.models, context, config)
        self._rates = Rates(optimizer=self.optimizer, context=context, config=config)
        self._by_tensor = self._make_tensor_optimizer(adapters)
        self._gradients = HeadGradients.of(self.models, self.optimizer)
        self._passes = evolve(self._passes_of(self.models), mtp_loss_weight=config.mtp_loss_weight if config.mtp else None)
        needs_copy = context.needs_reference and (adapters is None or context.reference is not None)
        self._reference = self._make_reference() if needs_copy else None
        self._exporter = Exporter(policy, Names.of(self._hf, context.head), layout, self._groups)
        head_names = Names.of_multi_token_head(self._hf) if config.mtp else None
        self._head_exporter = None if head_names is None else Exporter(policy, head_names, layout, self._groups)
        self._adapters = self._below = self._factors = None
        if adapters is not None:
            self._adapters = Exporter(policy, adapters, layout, self._groups)
            self._factors = Exporter(policy, adapters, layout, self._groups, merges=False)
            self._below = Exporter(policy, Names.of(self._hf), layout, self._groups, merges=False)
        self.residency = MegatronResidency(self._device, self.models, self._reference, self.optimizer, self._parked)

    def _make_tensor_optimizer(self, adapters: Names | None) -> TensorOptimizer | None:
        """The optimizer's step, where tensors have settings of their own."""
        spec = self._context.optimizer
        if not has_tensor_settings(spec):
            return None
        names = [Names.of(self._hf, self._context.head)] if adapters is None else [adapters]
        names += [Names.of_multi_token_head(self._hf)] if self._config.mtp else []
        return TensorOptimizer(self.models, self.optimizer, names, self._parallel, spec)

    def _build_reference_alone(self) -> None:
        self.models, self._reference = [], self._make_reference()
        self.optimizer = self._rates = self._passes = self._exporter = self._adapters = self._below = self._begun = None
        self._factors = self._gradients = self._head_exporter = self._by_tensor = None
        self.residency = MegatronResidency(self._device, [], self._reference, None)

    @property
    def _invariant_parts(self) -> int | None:
        return self._config.batch_invariant_parts if self._config.batch_invariant else None

    def _make_reference(self) -> list[PolicyModel]:
        """This rank's parts of the frozen model."""
        context, layout = self._context, self._parallel
        # What of the recipe's section holds the policy's own weights is not the reference's, where that is another model.
        spec = context.reference or context.model
        own = self._config if context.reference is None else evolve(self._config, pretrained_checkpoint=None)
        hf = self._hf if context.reference is None else load_config(spec)
        transformer = transformer_config(hf, own, layout, spec.dtype, self._device.type)
        reference = build(transformer, hf, layout, invariant_parts=self._invariant_parts)
        read_images(reference, hf, spec)
        load_initial(reference, hf, spec, own, layout)
        for model in reference:
            model.requires_grad_(False)
        return reference

    def _passes_of(self, models: Sequence[Any]) -> Passes:
        head = self._context.head
        return Passes(models=models, layout=self._parallel, groups=self._groups, device=self._device, head=head)

    @spi.hookimpl
    def train_step(self, request: spi.TrainStepRequest) -> spi.TrainStepResult:
        self._check("train_step", request.weight_version)
        check_routing(request.microbatches, self._dims)
        with self.residency.gradients(), cuda_or_cpu(self._device.type):
            found: list[Tensor] = []
            self._drop_gradients()
            totals = self._accumulate(request, found)
            norms = self._norms()  # takes the processor a while: best before the first figure waits for the device
            stats = self._loss_stats(totals, request.microbatches, norms)
            check_finite(stats, self.weight_version, self._non_finite_names)
            check_bounds(stats, request.bounds, self.weight_version)
            norms = self._gradient_norms(request)
            rate = self.update(stats.grad_norm, request.schedule_step, stats.metrics.get(MTP_GRAD_NORM))
            logprobs = self._found_logprobs(found, request)
        self.weight_version += 1
        return stats.result(weight_version=self.weight_version, learning_rate=rate, logprobs=logprobs, gradient_norms=norms)

    @spi.hookimpl
    def forward_backward(self, request: spi.ForwardBackwardRequest) -> spi.ForwardBackwardResult:
        self._check("forward_backward", request.weight_version)
        check_routing(request.microbatches, self._dims)
        with self.residency.gradients(), cuda_or_cpu(self._device.type):
            if request.piece == 0:
                self._drop_gradients()
            found: list[Tensor] = []
            with unreduced(self.models):
                totals = self._accumulate(request, found)
            stats = self._loss_stats(totals, request.microbatches, StepStats(loss=0.0, grad_norm=0.0, metrics={}))
            check_finite(stats, self.weight_version, hook="forward_backward")
            logprobs = self._found_logprobs(found, request)
        self._num_accumulated += len(request.microbatches)
        return spi.ForwardBackwardResult(
            loss=stats.loss, metrics=stats.metrics, logprobs=logprobs, weight_version=self.weight_version
        )

    @spi.hookimpl
    def optim_step(self, request: spi.OptimStepRequest) -> spi.OptimStepResult:
        self._check("optim_step", request.weight_version)
        with self.residency.gradients(), cuda_or_cpu(self._device.type):
            self._num_accumulated = 0
            reduce_gradients(self.models)
            stats = self._norms()
            check_finite(stats, self.weight_version, self._non_finite_names, hook="optim_step")
            norms = self._gradient_norms(request)
            rate = self.update(stats.grad_norm, request.schedule_step, stats.metrics.get(MTP_GRAD_NORM), request)
        self.weight_version += 1
        figures = {"grad_norm": stats.grad_norm, "metrics": stats.metrics, "learning_rate": rate, "gradient_norms": norms}
        return spi.OptimStepResult(weight_version=self.weight_version, **figures)

    @spi.hookimpl
    def use_adapter(self, request: spi.UseAdapterRequest) -> spi.UseAdapterResult:
        self._check("use_adapter", self.weight_version)
        if self._context.lora is None:
            raise spi.ContractError("use_adapter: found a trainer of whole weights; expected context.lora")
        self._gather_parameters()
        for name in request.drops:
            self._parked.pop(name, None)
        with self.residency.gradients(), cuda_or_cpu(self._device.type):
            if request.name != self._adapter:
                if self._adapter not in request.drops:
                    own = {"seed": self._seed, "begun": self._begun, "weight_version": self.weight_version}
                    own |= {"rank": rank_of(self.models), "num_accumulated": self._num_accumulated}
                    parked = park(self.models, self.optimizer, **own)
                    self._parked[self._adapter] = parked
                self._adapter = request.name
                self._drop_gradients()
                found = self._parked.pop(request.name, None)
                if request.seed is None:
                    assert found is not None, "the handle knows the adapters"
                    put_back(self.models, self.optimizer, found)
                    set_rank(self.models, found.rank)
                    self._seed, self._begun = found.seed, found.begun
                    self.weight_version, self._num_accumulated = found.weight_version, found.num_accumulated
            if request.seed is not None:
                self._drop_gradients()
                clear(self.optimizer)
                self._seed, self.weight_version = request.seed, 0
                self._begun = initialise_adapters(self.models, self._hf, self._context, request.seed, request.rank)
        return spi.UseAdapterResult(weight_version=self.weight_version)

    @spi.hookimpl
    def get_logprobs(self, request: spi.LogprobsRequest) -> spi.LogprobsResult:
        self._check("get_logprobs", request.weight_version)
        check_routing(request.microbatches, self._dims)
        with self._requested(request) as models, cuda_or_cpu(self._device.type):
            logprobs, entropies = self._passes_of(models).logprobs(request)
            if models is self._reference:  # the policy's copies serve more calls, a frozen model's only take room from training
                drop_float8_copies(models)
        return spi.LogprobsResult(logprobs=logprobs, entropy=entropies, weight_version=self.weight_version)

    @spi.hookimpl
    def get_values(self, request: spi.ValuesRequest) -> spi.ValuesResult:
        self._check("get_values", request.weight_version)
        with cuda_or_cpu(self._device.type):
            values = self._passes.values(request)
        return spi.ValuesResult(values=values, weight_version=self.weight_version)

    @spi.hookimpl
    def export_weights(self, request: spi.ExportWeightsRequest) -> spi.WeightExport:
        self._check("export_weights", request.weight_version)
        self._gather_parameters()
        return self._export(request)

    @spi.hookimpl
    def set_residency(self, request: spi.SetResidencyRequest) -> spi.SetResidencyResult:
        self._gather_parameters()
        self._num_accumulated = 0
        self._parked.update({name: evolve(one, gradients=(), num_accumulated=0) for name, one in self._parked.items()})
        return spi.SetResidencyResult(device_bytes=self.residency.move(request), reserved_bytes=reserved_bytes(self._device))

    @spi.hookimpl
    def save_state(self, request: spi.SaveStateRequest) -> spi.SaveStateResult:
        with self.residency.resident(), cuda_or_cpu(self._device.type):
            self._gather_parameters()
            hooks = {"resume": self._save_resume, "export": self.export_whole, "adapters": self._whole_adapters}
            return save_state(request, self._context, self.weight_version, **hooks, rank=rank_of(self.models))

    @spi.hookimpl
    def load_state(self, request: spi.LoadStateRequest) -> spi.LoadStateResult:
        with self.residency.resident(), cuda_or_cpu(self._device.type):
            index = checkpoint.load(request.directory, self.models, self.optimizer, with_state=request.optimizer)
            self.weight_version = index.weight_version
            set_rank(self.models, index.lora_rank)
            self._begun = load_reference(request.directory) if self._adapters is not None else None
        return spi.LoadStateResult(weight_version=self.weight_version)

    @spi.hookimpl
    def close(self, request: spi.CloseRequest) -> None:  # noqa: ARG002
        release_graphs(self.models)
        self._shard_sender.close()
        del self.models, self._passes, self._reference, self.optimizer, self._rates, self._exporter, self.residency
        del self._groups, self._adapters, self._below, self._factors, self._gradients, self._head_exporter, self._by_tensor
        gc.collect()  # hooks on parameters and the head refer to what holds them
        with cuda_or_cpu(self._device.type):
            parallel.leave()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _check(self, hook: str, weight_version: int) -> None:
        check_state(hook, weight_version, self.weight_version, failed_midway=self._failed_midway)

    @contextmanager
    def _requested(self, request: spi.LogprobsRequest) -> Iterator[Sequence[Any]]:
        """The model that is asked for: as a reference, with adapters, the policy's beginning."""
        is_own = self._context.needs_reference and self._context.reference is None
        if self._adapters is None or not is_own or request.model == "policy":
            yield requested_model(request, self.models, self._reference)
            return
        self._gather_parameters()
        with as_begun(self.models, self._begun):
            yield self.models

    def _export(self, request: spi.ExportWeightsRequest) -> spi.WeightExport:
        exporters = [self._exporter]
        if request.adapters != "merged" and self._adapters is not None and self._below is not None:
            exporters = [self._adapters] if request.adapters == "alone" else [self._below, self._adapters]
        if request.sharded:
            return shard(exporters, request, self._shard_sender)
        return reduce(one_after_the_other, (exporter.export(request) for exporter in exporters))

    def export_whole(self, request: spi.ExportWeightsRequest) -> spi.WeightExport:
        """Export all tensors of a model's files, the multi-token head's among them, which refits leave out."""
        self._gather_parameters()
        exporters = [self._exporter] if self._head_exporter is None else [self._exporter, self._head_exporter]
        return reduce(one_after_the_other, (exporter.export(request) for exporter in exporters))

    def _whole_adapters(self) -> Iterator[tuple[str, Tensor]]:
        if self._factors is not None:
            request = spi.ExportWeightsRequest(
                weight_version=self.weight_version, dtype="float32", max_bucket_bytes=BUCKET_BYTES
            )
            for bucket in self._factors.export(request).buckets:
                for named in bucket.tensors:
                    yield named.name, named.tensor.clone()

    def _drop_gradients(self) -> None:
        self._num_accumulated = 0
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _accumulate(self, request: spi.TrainStepRequest | spi.ForwardBackwardRequest, logprobs: list[Tensor]) -> Totals | None:
        microbatches = [move(batch, self._device, request.loss.token_columns) for batch in request.microbatches]
        if self._config.mtp:  # whose head reads the embedding apart from the layer that would wait for it
            self._gather_parameters()
        errors = DeferredErrors()
        try:
            kept = logprobs if request.logprobs else None
            prepare = partial(self._drop_inputs, request.weight_version)
            outputs = self._passes.train(microbatches, request.loss, request.counts, request.temperature, errors, kept, prepare)
            if self._parallel.pipeline > 1:  # whose other stages know no loss
                errors.raise_first()
        except BaseException:
            self._failed_midway = self._parallel.world_size > 1  # the other ranks wait in a collective of this one
            raise
        finally:
            self._drop_nothing()
        errors.raise_first()
        return total(outputs) if outputs else None

    def _drop_inputs(self, version: int, model: Any, index: int, microbatch: Microbatch) -> None:
        """Before a microbatch of a step: what adapters drop of it. Ranks that have the same tokens drop the same."""
        share = self._context.lora.dropout if self._context.lora is not None else 0.0
        if share:
            place = self.layout.data_parallel_rank, self._parallel.context_rank
            key = self._seed, version, *place, self._num_accumulated + index
            dropout = Dropout(share=share, key=key, num_tokens=len(microbatch.tokens))
            unwrapped([model])[0].adapters.dropout = dropout

    def _drop_nothing(self) -> None:
        if self._context.lora is not None:
            for model in unwrapped(self.models):
                model.adapters.dropout = None

    def _norms(self) -> StepStats:
        """The gradients' norms, with no loss; the gradients are the optimizer's then."""
        self.optimizer.prepare_grads()
        norm = self._gradients.norm("policy")
        of_head = {MTP_GRAD_NORM: self._gradients.norm("head")} if self._config.mtp else {}
        return StepStats(loss=0.0, grad_norm=norm, metrics=of_head)

    def _gradient_norms(self, request: spi.TrainStepRequest | spi.OptimStepRequest) -> dict[str, float] | None:
        """The norms of the policy's tensors, or of its adapters', before clipping, where the request asks for them."""
        if not request.gradient_norms:
            return None
        return gradient_norms(self._adapters or self._exporter, self.optimizer, self._parallel, self._device)

    def _loss_stats(self, totals: Totals | None, microbatches: Sequence[spi.TokenBatch], norms: StepStats) -> StepStats:
        """The figures of the passes, and these norms."""
        loss, sums, maxima = reduce_totals(totals, self._parallel, self._groups)
        routers = self._passes.router_metrics(microbatches)
        return evolve(norms, loss=loss, metrics={**sums, **maxima, **routers, **norms.metrics})

    def _found_logprobs(
        self, found: Sequence[Tensor], request: spi.TrainStepRequest | spi.ForwardBackwardRequest
    ) -> tuple[Float32Array, ...] | None:
        lengths = [batch.num_tokens for batch in request.microbatches]
        return self._passes.on_every_stage(found, lengths, num_rows=1)[0] if request.logprobs else None

    def update(
        self,
        norm: float,
        schedule_step: int,
        norm_of_head: float | None = None,
        given: spi.OptimStepRequest | None = None,
    ) -> float:
        """Clip and step, the multi-token head by its own norm, with the settings that `given` names; returns the learning rate
        used."""
        rate = self._rates.set(schedule_step, given)
        limit = self.optimizer.config.clip_grad
        limit = limit if given is None or given.max_grad_norm is None else given.max_grad_norm
        self._gradients.clip("policy", norm, limit)
        if norm_of_head is not None:
            self._gradients.clip("head", norm_of_head, limit)
        if self._by_tensor is not None:
            overrides = NO_OVERRIDES if given is None else StepOverrides.of(given)
            self._by_tensor.step(rate / self._context.optimizer.learning_rate, overrides)
        self.optimizer.step_with_ready_grads()
        return rate

    def _gather_parameters(self) -> None:
        """Gather new weights now: with `ddp.overlap_param_gather` a layer's are gathered only when it next computes."""
        if self.models and self.models[0].ddp_config.overlap_param_gather:
            for model in self.models:
                model.start_param_sync(force_sync=True)

    def _non_finite_names(self) -> list[str]:
        """Parameters, by their names in Hugging Face's files, whose gradient is NaN or infinite on any rank."""
        mine = [
            name
            for part, model in enumerate(unwrapped(self.models))
            for exporter in (self._adapters or self._exporter, self._head_exporter)
            for parameter, names in (() if exporter is None else exporter.names_of(part).items())
            if (trained := model.get_parameter(parameter)).requires_grad and not trained.main_grad.isfinite().all()
            for name in names
        ]
        everyone: list[list[str]] = [mine]
        if self._parallel.world_size > 1:
            everyone = [[]] * self._parallel.world_size
            dist.all_gather_object(everyone, mine)
        return list(dict.fromkeys(name for names in everyone for name in names))

    def _save_resume(self, directory: Path) -> tuple[str, ...]:
        files = checkpoint.save(directory, self.models, self.optimizer, self.weight_version, self._context.rank_info)
        is_writer = self._begun is not None and self._context.rank_info.rank == 0
        return (*files, *save_reference(directory, self._begun)) if is_writer and self._begun is not None else files


def _layout(
    context: spi.TrainerContext, config: MegatronConfig, model: dict[str, Any], reference: dict[str, Any]
) -> ParallelLayout:
    """ConfigError for what `check` could not see of models on the Hub, the policy and its reference."""
    rank_info = context.rank_info
    where = rank_info.world_size, rank_info.device
    problems = [*reference_layout_problems(config, *where, reference)]
    if context.needs_policy:
        problems = [*layout_problems(config, *where, model), *problems]
    for content in (model, reference):
        family = find_family(content, context.model.path)
        assert not isinstance(family, spi.Problem), "the model was loaded"
        trains = context.needs_policy and content is model
        problems += family_option_problems(family, config, rank_info.device, context.model.dtype, trains=trains)
        if config.batch_invariant:
            problems += invariant_model_problems(OPTION, content, context.model.path, config.batch_invariant_parts)
        if trains:
            problems += head_problems(family, config, content, context.model.path)
            problems += pattern_problems(context, config, family, content)
    problems = list(dict.fromkeys(problems))
    if problems:
        raise spi.ConfigError(problems)
    gpu = rank_info.device == "cuda"
    is_copy = context.needs_policy and (context.lora is None or context.reference is not None)
    holds_reference = context.needs_reference and is_copy
    return ParallelLayout.of(
        config,
        rank_info.rank,
        rank_info.world_size,
        model,
        rank_info.device,
        context.max_sequence_length,
        max_microbatch_tokens=context.max_microbatch_tokens,
        memory_bytes=torch.cuda.get_device_properties(rank_info.local_rank).total_memory if gpu else None,
        local_size=torch.cuda.device_count() if gpu else 1,
        dtype=context.model.dtype,
        reference=reference if holds_reference else None,
        lora=context.lora,
        optimizer=context.optimizer,
        trains=context.needs_policy,
    )
