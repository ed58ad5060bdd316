"""The layouts that the trainer could have, each with its memory and seconds: for `rlcore plan`; imports no torch."""

from collections.abc import Iterator, Sequence
from itertools import product

from attrs import evolve

from rlcore.spi import PlanContext, PlanOption
from rlcore.spi.weights import ITEM_BYTES
from rlcore_megatron.families.models import FAMILIES
from rlcore_megatron.layouts.auto_layout import candidate_sizes, choose
from rlcore_megatron.layouts.float8_share import weight_gradients_are_narrow, wide_layers
from rlcore_megatron.layouts.layout_check import (
    AUTO_SIZES,
    invariant_size_problems,
    layout_problems,
    reference_layout_problems,
)
from rlcore_megatron.layouts.memory import Estimate, Workload, adapter_parameters, estimate
from rlcore_megatron.layouts.optimizer_memory import share_on_host
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_torchkit.trainer.step_costs import Layout, num_parameters
from rlcore_torchkit.trainer.trainer_plan import (
    PlannedModel,
    crossing,
    host_update_seconds,
    planned_model,
    sent_copies,
    trainer_seconds,
)

MOST = 16
"""Most context ranks, and most stages, that a plan looks at."""
EXCHANGE_BYTES = 2 * 2**30
"""Bytes that an exchange of tokens with other ranks' experts takes on each device, also between steps: NCCL's buffers, and the
allocator's segments in use. With them 13 GiB were beside weights and state of 30B-A3B on four H200."""
FUSED, PLAIN = 1.0, 1.75
"""Memory traffic of layers, in relation to fused kernels, with and without TransformerEngine."""


def plan(context: PlanContext, config: MegatronConfig) -> Sequence[PlanOption]:
    """Every layout that divides model and ranks; the section's own, with the sizes that "auto" is on these devices, where that
    one is asked for. ConfigError where "auto" finds none."""
    model = planned_model(context.model, FAMILIES)
    reference = None if context.reference is None else planned_model(context.reference, FAMILIES)
    if config.transformer_engine is None and (context.lora is not None or not context.as_configured):
        # The machine that plans need not have it; the one that trains should.
        config = evolve(config, transformer_engine=context.lora is None and not config.batch_invariant)
    load = Workload(
        world_size=context.world_size,
        model=model.config,
        device="cuda",
        max_sequence_length=context.max_sequence_length,
        max_microbatch_tokens=context.max_microbatch_tokens,
        local_size=context.local_size,
        dtype=context.dtype,
        reference=None if reference is None or context.lora is not None else reference.config,
        lora=context.lora,
        optimizer=context.optimizer,
    )
    if context.as_configured:
        chosen = choose(config, evolve(load, memory_bytes=context.device.memory_bytes)).config
        return [_option(context, model, reference, config, chosen, load)]
    return [_option(context, model, reference, config, changed, load) for changed in _changed(context, model, config, load)]


def _changed(context: PlanContext, model: PlannedModel, config: MegatronConfig, load: Workload) -> Iterator[MegatronConfig]:
    """The sections to look at: sizes that are numbers already stay."""
    chosen = tuple(name for name in AUTO_SIZES if getattr(config, name) == "auto")
    recomputing = ("none", "full") if config.recompute == "none" else (config.recompute,)
    for sizes, recompute in product(candidate_sizes(chosen, load, model.dims), recomputing):
        changes = dict(zip(chosen, sizes, strict=True))
        if max(changes.get("context_parallel", 1), changes.get("pipeline_parallel", 1)) > MOST:
            continue
        changed = evolve(config, **changes, recompute=recompute)
        if layout_problems(changed, context.world_size, "cuda", model.config, load.family):
            continue
        if config.batch_invariant and any(invariant_size_problems(changed, context.world_size)):
            continue
        if not reference_layout_problems(changed, context.world_size, "cuda", load.reference, load.reference_family):
            yield changed


def _option(
    context: PlanContext,
    model: PlannedModel,
    reference: PlannedModel | None,
    given: MegatronConfig,
    config: MegatronConfig,
    load: Workload,
) -> PlanOption:
    found, copies = estimate(model.dims, config, load), sent_copies(context, model.dims)
    kept = sum(copies.values()) + (EXCHANGE_BYTES if int(config.expert_parallel) > 1 else 0)
    changed = {name: getattr(config, name) for name in (*AUTO_SIZES, "recompute")}
    seconds = trainer_seconds(
        context,
        model.dims,
        _layout(context, config),
        recomputes=config.recompute == "full",
        reference=None if reference is None else reference.dims,
        state_bytes=2.0 * (found.optimizer + found.weights),
        num_trained=None if context.lora is None else adapter_parameters(model.dims, load),
    )
    on_host = share_on_host(config.optimizer)
    if on_host:
        trained = num_parameters(model.dims) if context.lora is None else adapter_parameters(model.dims, load)
        sent = ITEM_BYTES[context.dtype] + (4 if config.ddp.get("grad_reduce_in_fp32", True) else ITEM_BYTES[context.dtype])
        seconds["training"] += context.updates * host_update_seconds(context, on_host * trained / context.world_size, sent)
    return PlanOption(
        options={name: value for name, value in changed.items() if value != getattr(given, name)},
        memory=_memory(found) | copies,
        idle={"none": found.weights + found.optimizer + kept, "state": found.weights + kept, "all": kept},
        seconds=seconds,
        assumptions=("megatron computes its layers by TransformerEngine, unless the recipe says otherwise or has adapters.",),
    )


def _memory(found: Estimate) -> dict[str, int]:
    parts = {"weights": found.weights, "gradients": found.gradients, "optimizer state": found.optimizer}
    if found.step > found.activations + found.logits:
        return parts | {"copies of the optimizer's step": found.step}
    return parts | {"activations": found.activations, "logits": found.logits}


def _layout(context: PlanContext, config: MegatronConfig) -> Layout:
    tensor, ways = int(config.tensor_parallel), int(config.context_parallel)
    stages, expert = int(config.pipeline_parallel), int(config.expert_parallel)
    data = context.world_size // (tensor * ways * stages)
    sizes = {
        "tensor": (tensor, 1),
        "context": (ways, tensor),
        "expert": (expert, config.expert_tensor_parallel),
        "data": (data, tensor * ways),
        "pipeline": (stages, tensor * ways * data),
    }
    return Layout(
        tensor=tensor,
        context=ways,
        pipeline=stages,
        expert=expert,
        data=data,
        crosses_nodes=crossing(sizes, context.local_size),
        kernels=FUSED if config.transformer_engine else PLAIN,
        float8="all" if config.fp8 else "none",
        wide_layers=wide_layers(config),
        float8_weight_gradients=weight_gradients_are_narrow(config),
    )
