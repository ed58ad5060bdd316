"""The layouts that the trainer could have, with what each takes of a GPU and of the time: for `rlcore plan`; imports no torch.

Memory is the table in docs/fsdp2.md, with activations as in Korthikanti et al. (arXiv:2205.05198), for gated MLPs and fused
attention.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from attrs import evolve

from rlcore.spi import PlanContext, PlanOption, Problem
from rlcore.spi.weights import ITEM_BYTES
from rlcore_fsdp2.config import MOST_HELD, Fsdp2Config
from rlcore_fsdp2.layout_check import layout_problems
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.architectures.registry import find_architecture
from rlcore_torchkit.optimizer.settings import DECODED_BYTES, DECODED_ELEMENTS
from rlcore_torchkit.trainer.step_costs import Layout, layer_parameters, num_microbatches, num_parameters, state_bytes
from rlcore_torchkit.trainer.trainer_plan import (
    crossing,
    host_update_seconds,
    planned_model,
    sent_copies,
    tokens_of,
    trainer_seconds,
)

SIZES = ("tensor_parallel", "context_parallel", "expert_parallel")
"""Sizes that a plan varies, unless the recipe sets them above 1."""
UNFUSED = 1.2
"""Norms, rotary embeddings and gates keep what fused kernels do not: 46,600 elements a token and layer of 1.5B where fused
kernels keep 38,400."""
PLAIN_KERNELS, COMPILED_KERNELS = 1.75, 1.0
"""Memory traffic of layers, in relation to fused kernels, without and with `compile_layers`."""
LOGITS_ELEMENTS = 3 * 2**26
"""Logits of one chunk, each with its gradient."""
LAYERS_IN_USE = 2
"""Layers whose gathered weights are held: the one that computes, and the next."""
EXPERTS_PAY = 64
"""Most ranks among which experts are divided in a plan."""


def plan(context: PlanContext, config: Fsdp2Config) -> Sequence[PlanOption]:
    """Every layout that divides model and ranks; the section's own where that one is asked for."""
    model = planned_model(context.model)
    reference = None if context.reference is None else planned_model(context.reference).dims
    if context.as_configured:
        return [_option(context, model.dims, reference, config, config)]
    is_described = not isinstance(find_architecture(context.model, "config.json"), Problem)
    return [
        _option(context, model.dims, reference, config, changed)
        for changed in _changed(context, config, is_described=is_described)
        if not list(layout_problems(changed, context.world_size, "cuda", model.config))
        and not _is_repeated(context, model.dims, config, changed)
    ]


def _changed(context: PlanContext, config: Fsdp2Config, *, is_described: bool) -> Iterator[Fsdp2Config]:
    """The sections to look at; a model that no family describes is divided by FSDP alone."""
    powers = [2**number for number in range(10) if context.world_size % 2**number == 0]
    most = {"tensor_parallel": context.local_size, "context_parallel": 16, "expert_parallel": EXPERTS_PAY}
    ranges = [
        [size for size in powers if size <= most[name]]
        if getattr(config, name) == 1 and is_described
        else [getattr(config, name)]
        for name in SIZES
    ]
    recomputing = [True] if config.activation_checkpointing else [False, True]
    reducing = [config.reduce_every_microbatch]
    if config.reduce_every_microbatch is None and context.world_size > 1:
        reducing.append(True)
    for *sizes, recompute, reduce in product(*ranges, recomputing, reducing):
        changes = dict(zip(SIZES, sizes, strict=True))
        yield evolve(config, **changes, activation_checkpointing=recompute, reduce_every_microbatch=reduce)


def _option(
    context: PlanContext, dims: ModelDims, reference: ModelDims | None, given: Fsdp2Config, config: Fsdp2Config
) -> PlanOption:
    layout = _layout(context, config)
    memory, copies = memory_of(context, dims, reference, config), sent_copies(context, dims)
    kept = sum(copies.values())
    changed = {name: getattr(config, name) for name in (*SIZES, "activation_checkpointing", "reduce_every_microbatch")}
    weights, state = memory["weights"], memory["optimizer state"]
    seconds = trainer_seconds(
        context,
        dims,
        layout,
        recomputes=config.activation_checkpointing,
        reference=reference,
        state_bytes=2.0 * (weights + state),
        num_trained=_num_trained(context, dims),
    )
    if _reduces_every_microbatch(context, dims, config) and layout.data > 1:
        reduced = _master_bytes(context) * num_parameters(dims) / config.tensor_parallel
        rate = context.device.network if "data" in layout.crosses_nodes else context.device.link
        steps = num_microbatches(tokens_of(context, 1 / context.updates), layout)
        seconds["training"] += 0.5 * reduced / rate * max(steps - 1, 0) * context.updates
    if config.cpu_offload:
        seconds = _with_weights_from_host(context, dims, reference, config, seconds)
    return PlanOption(
        options={name: value for name, value in changed.items() if value != getattr(given, name)},
        memory=memory | copies,
        idle={"none": weights + state + kept, "state": weights + kept, "all": kept},
        seconds=seconds,
        assumptions=("fsdp2 hides the gathering of weights behind computation of the same microbatch.",),
    )


def _with_weights_from_host(
    context: PlanContext, dims: ModelDims, reference: ModelDims | None, config: Fsdp2Config, seconds: Mapping[str, float]
) -> dict[str, float]:
    """The seconds where each microbatch brings the rank's weights from the host, while the device computes, and where the host
    updates them. Frozen weights come in the model's dtype, others as masters; they come forward and, unless kept, backward."""
    layout, shards = _layout(context, config), context.world_size // config.replicate
    frozen = ITEM_BYTES[context.dtype]
    item = _master_bytes(context) if context.lora is None else frozen
    own = item * num_parameters(dims) / shards / context.device.host
    other = frozen * num_parameters(reference or dims) / shards / context.device.host
    arrivals = 2 if config.reshard_after_forward else 1
    update, whole = (num_microbatches(tokens_of(context, share), layout) for share in (1 / context.updates, 1.0))
    trained = _num_trained(context, dims)
    updated = host_update_seconds(context, (num_parameters(dims) if trained is None else trained) / shards, 4)
    return {
        "log-probabilities": max(
            seconds["log-probabilities"], whole * (own * context.policy_passes + other * context.reference_passes)
        ),
        "training": max(seconds["training"], arrivals * own * update * context.updates) + updated * context.updates,
    }


def _layout(context: PlanContext, config: Fsdp2Config) -> Layout:
    tensor, ways = config.tensor_parallel, config.context_parallel
    data = context.world_size // tensor // ways
    sizes = {
        "tensor": (tensor, 1),
        "context": (ways, tensor),
        "expert": (config.expert_parallel, tensor),
        "data": (data, tensor * ways),
    }
    return Layout(
        tensor=tensor,
        context=ways,
        expert=config.expert_parallel,
        data=data,
        crosses_nodes=crossing(sizes, context.local_size),
        kernels=COMPILED_KERNELS if config.compile_layers else PLAIN_KERNELS,
        gathers_weights=context.world_size // config.replicate > tensor,
        float8="without experts" if config.fp8 else "none",
    )


def _num_trained(context: PlanContext, dims: ModelDims) -> float | None:
    """The parameters of adapters, which are as wide as `rank` at both ends of a layer's linear layers; None without any."""
    if context.lora is None:
        return None
    return context.lora.rank * dims.num_layers * (8 * dims.hidden_size + 3 * dims.intermediate_size)


def memory_of(context: PlanContext, dims: ModelDims, reference: ModelDims | None, config: Fsdp2Config) -> dict[str, int]:
    """Bytes of one rank at the peak of an update, by part."""
    item, master, tensor = ITEM_BYTES[context.dtype], _master_bytes(context), config.tensor_parallel
    shards = context.world_size // config.replicate
    total = num_parameters(dims)
    trained = _num_trained(context, dims)
    state = state_bytes(context.optimizer, dims, trained) * master / 4 / shards
    if trained is None:
        trained = total
        weights = master * total / shards
        gathered = 0.0 if item == master else item * total  # the one rounded copy of a single rank
    else:
        weights, gathered = item * total / shards, 0.0
    if shards > 1:
        gathered = item * _in_use(dims, config)
    gradients = master * trained / shards
    steps = num_microbatches(tokens_of(context, 1 / context.updates), _layout(context, config))
    if shards > tensor and steps > 1 and not _reduces_every_microbatch(context, dims, config):
        gradients += master * _held(trained, dims, config)
    if context.reference_passes and context.lora is None and reference is not None:
        weights += item * num_parameters(reference) / shards
    if config.cpu_offload:
        weights = state = 0.0
    tokens = max(context.max_microbatch_tokens, context.max_sequence_length)
    logits = min(LOGITS_ELEMENTS, tokens * dims.vocab_size / tensor) * 2 * master
    activations = _activation_bytes(dims, config, tokens * item / config.context_parallel, logits)
    if context.optimizer.moments == "8bit" and not config.cpu_offload:
        # The step decodes moments once activations and logits are gone.
        activations = max(activations, DECODED_BYTES * min(trained / shards, DECODED_ELEMENTS) - logits)
    parts = {
        "weights": weights + gathered,
        "gradients": gradients,
        "optimizer state": state,
        "activations": activations,
        "logits": logits,
    }
    return {name: int(size) for name, size in parts.items()}


def _master_bytes(context: PlanContext) -> int:
    """Bytes of a master weight, and of its gradient, a moment or a logit."""
    return max(4, ITEM_BYTES[context.dtype])


def _is_repeated(context: PlanContext, dims: ModelDims, given: Fsdp2Config, config: Fsdp2Config) -> bool:
    """Return whether it says what the given section does by itself."""
    if not config.reduce_every_microbatch or given.reduce_every_microbatch is not None:
        return False
    return _reduces_every_microbatch(context, dims, evolve(config, reduce_every_microbatch=None))


def _reduces_every_microbatch(context: PlanContext, dims: ModelDims, config: Fsdp2Config) -> bool:
    """As a run decides it."""
    if config.reduce_every_microbatch is not None:
        return config.reduce_every_microbatch
    trained = _num_trained(context, dims)
    held = _master_bytes(context) * _held(num_parameters(dims) if trained is None else trained, dims, config)
    return held > MOST_HELD * context.device.memory_bytes


def _held(trained: float, dims: ModelDims, config: Fsdp2Config) -> float:
    """Parameters whose gradients a rank accumulates before they are reduced."""
    _, experts = layer_parameters(dims)
    share = trained / num_parameters(dims)
    return share * (trained / share - experts + experts / config.expert_parallel) / config.tensor_parallel if trained else 0.0


def _in_use(dims: ModelDims, config: Fsdp2Config) -> float:
    """Elements of gathered weights: some layers', the embedding's and the head's."""
    plain, experts = layer_parameters(dims)
    layers = dims.num_layers if not config.reshard_after_forward else LAYERS_IN_USE
    each = (plain + experts / config.expert_parallel) / dims.num_layers
    return (layers * each + (1 if dims.tied else 2) * dims.vocab_size * dims.hidden_size) / config.tensor_parallel


def _activation_bytes(dims: ModelDims, config: Fsdp2Config, element: float, logits: float) -> float:
    """Return the bytes that the backward pass of all layers needs; `element` bytes for one element a token. With checkpointing
    they are the layers' inputs, and one layer that is computed again, when no logits are there."""
    tensor = config.tensor_parallel
    residual = dims.hidden_size / (tensor if config.sequence_parallel else 1)
    heads = dims.num_heads / tensor + max(1.0, dims.num_kv_heads / tensor)
    attention = 4 * residual + 3 * heads * dims.head_dim
    width = 3 * dims.hidden_size + 3 * dims.moe_intermediate_size
    experts = (dims.num_experts_per_token * width + 3 * dims.shared_intermediate_size) / tensor
    mlps = (dims.num_dense_layers * 3 * dims.intermediate_size / tensor + dims.num_moe_layers * experts) / dims.num_layers
    layer = UNFUSED * (attention + mlps) * element
    if config.activation_checkpointing:
        return dims.num_layers * residual * element + max(0.0, layer - logits)
    return dims.num_layers * layer
