"""Megatron's distributed data parallelism and optimizer, and the learning rate of each step."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from attrs import frozen
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, clip_grads, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import local_multi_tensor_l2_norm
from torch import Tensor

from rlcore.spi import OptimStepRequest, TrainerContext
from rlcore_megatron.modules.model import PolicyModel
from rlcore_megatron.setup.config import MegatronConfig, has_tensor_settings
from rlcore_megatron.setup.passthrough import converted
from rlcore_megatron.training.masters import FACTOR
from rlcore_megatron.training.partial_step import step_in_parts
from rlcore_torchkit.optimizer.settings import step_settings


def distribute(models: Sequence[PolicyModel], config: MegatronConfig, transformer: TransformerConfig, device: str) -> list[Any]:
    """Each part with buffers for its gradients, reduced over the ranks that hold the same weights; the sum, not the mean."""
    values: dict[str, Any] = {
        "use_distributed_optimizer": True,
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": device == "cuda",
    }
    ddp = DistributedDataParallelConfig(**values | converted(config.ddp, DistributedDataParallelConfig))
    # Only the first part of an interleaved stage is small enough to be reduced in buckets while others still compute.
    wrapped = [
        DistributedDataParallel(transformer, ddp, model, disable_bucketing=index > 0) for index, model in enumerate(models)
    ]
    for model in wrapped:
        _add_in_place(model)
    transformer.finalize_model_grads_func = _finalize
    if ddp.overlap_grad_reduce:
        transformer.no_sync_func = _one_or_all([model.no_sync for model in wrapped])
        if len(wrapped) > 1:
            transformer.grad_sync_func = [model.start_grad_sync for model in wrapped]
    return wrapped


def _add_in_place(model: torch.nn.Module) -> None:
    """Have TransformerEngine's products add weights' gradients to the buffers, which saves a write, a read and an addition.

    Megatron's `gradient_accumulation_fusion` does this too, but asks Apex for the output layer's, which is not its own here.
    """
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def _one_or_all(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions


def _finalize(models: list[Any], num_tokens: Any = None, **options: Any) -> None:  # noqa: ARG001 - Megatron would divide by it
    """Losses are divided by global counts already, so the sums over ranks and microbatches are the gradients."""
    finalize_model_grads(models, None, **options)


@contextmanager
def unreduced(models: Sequence[Any]) -> Iterator[None]:
    """Leave the gradients of the block's passes in this rank's buffers: adding to reduced ones would count some twice."""
    config = models[0].config
    names = ("finalize_model_grads_func", "no_sync_func", "grad_sync_func")
    kept = {name: getattr(config, name) for name in names}
    # Megatron's schedules leave `no_sync_func` before the last microbatch.
    changed = dict.fromkeys(names) | {"no_sync_func": nullcontext}
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(model.no_sync())
        for name, value in changed.items():
            setattr(config, name, value)
        try:
            yield
        finally:
            for name, value in kept.items():
                setattr(config, name, value)


def reduce_gradients(models: Sequence[Any]) -> None:
    """Add up over ranks what passes under `unreduced` have left."""
    for model in models:
        if model.ddp_config.overlap_grad_reduce:
            model.start_grad_sync()
    finalize_model_grads(list(models), None)


def make_optimizer(models: Sequence[Any], context: TrainerContext, config: MegatronConfig) -> MegatronOptimizer:
    """AdamW; masters and moments, float32 unless the recipe says else, are divided over ranks that hold the same weights.
    Where tensors have settings of their own, `TensorOptimizer` takes the step over."""
    spec = context.optimizer
    values: dict[str, Any] = {
        "optimizer": "adam",
        "lr": spec.learning_rate,
        "min_lr": _least_rate(context, config),
        "weight_decay": spec.weight_decay,
        "adam_beta1": spec.betas[0],
        "adam_beta2": spec.betas[1],
        "adam_eps": spec.eps,
        "clip_grad": spec.max_grad_norm,
        "bf16": context.model.dtype == "bfloat16",
        "params_dtype": models[0].config.params_dtype,
        "use_distributed_optimizer": True,
        "overlap_param_gather": bool(config.ddp.get("overlap_param_gather", False)),
    }
    options = OptimizerConfig(**values | converted(config.optimizer, OptimizerConfig))
    if has_tensor_settings(spec) and context.model.dtype == "bfloat16" and context.lora is None:
        # Megatron's layout without masters: the optimizer has the weights themselves, and gradients as the buffers keep them.
        options.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    optimizer = get_megatron_optimizer(options, list(models))
    step_in_parts(optimizer)
    return optimizer


def _least_rate(context: TrainerContext, config: MegatronConfig) -> float:
    """The rate at which a decay by Megatron's scheduler ends; it reads the parameter groups' before its own option."""
    given = config.scheduler.get("min_lr")
    return context.optimizer.learning_rate * context.schedule.min_learning_rate_ratio if given is None else float(given)


def clip(optimizer: MegatronOptimizer, norm: float, limit: float) -> None:
    """Scale the gradients, so that their global L2 norm, now `norm`, is at most `limit`; 0.0 never. Those in less than float32
    stay as they are where `Span.gradients` scales them."""
    if not 0.0 < limit < norm:
        return
    options, in_place = optimizer.config, list[Tensor]()
    name = "decoupled_grad" if options.use_precision_aware_optimizer_no_fp8_or_ds_fp8 else "grad"
    scales_later = name == "decoupled_grad" and not options.use_precision_aware_optimizer
    for key in (key for group in optimizer.param_groups for key in group["params"]):
        gradient = getattr(key, name, None)
        if gradient is None:
            continue
        if scales_later and gradient.dtype != torch.float32:
            setattr(key, FACTOR, limit / norm)
        else:
            in_place.append(gradient)
    if in_place:  # of another stage, or of no element of the multi-token head, there are none
        torch._foreach_mul_(in_place, limit / norm)


def _l2_norm(_chunk: int, _noop: Tensor, tensors: Sequence[Sequence[Tensor]], *_: Any) -> tuple[Tensor, None]:
    """float32 [1], as TransformerEngine's and Apex's kernels compute it, of gradients in any dtype."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors[0]]
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:  # Megatron's own computes in the gradients' dtype
    clip_grads.l2_norm_impl = _l2_norm


@frozen(kw_only=True)
class Rates:
    """Sets the learning rate and weight decay of a step, as a pure function of its place in the run's plan."""

    optimizer: MegatronOptimizer
    context: TrainerContext
    config: MegatronConfig

    def set(self, step: int, given: OptimStepRequest | None = None) -> float:
        """Set the rates of TrainStepRequest.schedule_step `step`, and what `given` names; returns the learning rate."""
        spec, settings = self.context.optimizer, step_settings(self.context, step, given)
        rate: float | None = settings.learning_rate
        overrides, decay = settings.overrides, settings.overrides.weight_decay
        if self.config.scheduler:
            scheduled = self._by_scheduler(step)
            rate = None if given is None else given.learning_rate
        elif decay is None:
            decay = spec.weight_decay
        for group in self.optimizer.param_groups:
            group["betas"] = overrides.betas or spec.betas
            group["eps"] = spec.eps if overrides.eps is None else overrides.eps
            if rate is not None:
                group["lr"] = rate * group.get("lr_mult", 1.0)
            if decay is not None:
                group["weight_decay"] = decay * group.get("wd_mult", 1.0)
        return scheduled if rate is None else rate

    def _by_scheduler(self, step: int) -> float:
        spec, schedule = self.context.optimizer, self.context.schedule
        values: dict[str, Any] = {
            "init_lr": 0.0,
            "max_lr": spec.learning_rate,
            "min_lr": _least_rate(self.context, self.config),
            "lr_warmup_steps": schedule.warmup_steps,
            "lr_decay_steps": self.context.num_train_steps,
            "lr_decay_style": schedule.decay,
            "start_wd": spec.weight_decay,
            "end_wd": spec.weight_decay,
            "wd_incr_steps": self.context.num_train_steps,
            "wd_incr_style": "constant",
        }
        scheduler = OptimizerParamScheduler(
            self.optimizer, **values | converted(self.config.scheduler, OptimizerParamScheduler)
        )
        scheduler.step(step)
        return float(self.optimizer.param_groups[0]["lr"])
