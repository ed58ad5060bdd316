"""Checks the engines' share of a device's memory; imports neither torch, transformers nor vLLM."""

import math
from collections.abc import Iterator, Sequence

from rlcore.gpu import device_memories, free_memories
from rlcore.spi import CheckContext, DtypeName, Note, Problem, find_channel
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.distributed.format_bytes import GIB, gib
from rlcore_vllm.checks.drafter_check import drafter_dims
from rlcore_vllm.setup.config import VllmConfig
from rlcore_vllm.setup.memory import CPU_BLOCK_TOKENS, CUDA_BLOCK_TOKENS, ModelSize, copies_bytes, model_size, recorder_bytes
from rlcore_vllm.setup.settings import copies_share, engines_per_device, keeps_copies, memory_share, with_devices

SECTION, SHARE = "generator.vllm", "gpu_memory_utilization"
SHORTER = "Lower rollout.max_prompt_tokens or rollout.max_response_tokens, or pass --max-length to `rlcore serve`."
AUTO_IS = '"auto", which is '
BESIDE_TRAINER = (
    'Others on the device keep the rest: set offload.trainer to "state" or "all", have what else is there take less, '
    "or take more devices"
)


def share_notes(context: CheckContext, config: VllmConfig) -> Iterator[Note]:
    """Report the share that "auto" is where no run has put a number in its place, and devices that have less to give now."""
    if context.device != "cuda":
        return
    config = with_devices(config, context.generator_devices)
    share = memory_share(config, context)
    if config.gpu_memory_utilization == "auto":
        yield Note(path=f"{SECTION}.{SHARE}", text=f'"auto" is {share} of a device: {"; ".join(_reasons(context, config))}')
    memories, free = device_memories(), free_memories()
    for device in (0,) if config.devices is None else config.devices:
        if memories and free and device < min(len(memories), len(free)) and free[device] < share * memories[device]:
            most = math.floor(100 * free[device] / memories[device]) / 100
            remedy = f"End that, or set at most {most:g}" if most else "End that"
            text = (
                f"{share} of {gib(memories[device])}, of which {gib(free[device])} are free at the moment: something else is "
                f"on device {device}, and vLLM starts on none that has less free than its share. {remedy}"
            )
            yield Note(path=f"{SECTION}.{SHARE}", text=text)


def _reasons(context: CheckContext, config: VllmConfig) -> Iterator[str]:
    """Explain the share that `memory_share` takes for "auto"."""
    is_alone = context.channel is None or find_channel(context.channel).reach == "separate"
    yield "engines have their devices to themselves" if is_alone else "what the trainer keeps is not known"
    if not keeps_copies(context):
        return
    copies = 'copies of weights (refit.delta = "device") are there too'
    if copies_share(config, context) is not None:
        yield f"{copies}, and leave as much"
    else:
        yield (
            f"{copies}, and which share they have is not known here. Engines take what they leave where nvidia-smi shows the "
            f"device to the process that starts them, and this model has a config.json. Set {SHARE} if neither is right"
        )


def memory_problems(
    dims: ModelDims, context: CheckContext, config: VllmConfig, memories: Sequence[int] | None
) -> Iterator[Problem]:
    """Refuse a model, or one sequence of its KV cache, that an engine's share cannot hold. Activations are left out here: vLLM
    measures them when it starts."""
    if "cpu_offload_gb" in config.engine:
        return  # the sizes are then others, and the section's keys not what decides
    size, longest = _engine_size(dims, context.model.dtype, config), context.max_sequence_length
    if context.device == "cpu":
        needed, given = size.kv_bytes(longest, CPU_BLOCK_TOKENS), config.cpu_kv_cache_gib * GIB
        if needed > given:
            yield section_problem(
                "cpu_kv_cache_gib",
                f"{config.cpu_kv_cache_gib}",
                f"at least {_rounded_up(needed / GIB)}: one sequence of {longest} tokens needs {gib(needed)}",
                f"Raise it, or: {SHORTER}",
            )
        return
    devices = (0,) if config.devices is None else config.devices
    if not memories or max(devices) >= len(memories):
        return
    num_shared = engines_per_device(config)
    total = min(memories[device] for device in devices)
    copies = copies_bytes(dims, context.model.dtype, context.channel, num_shared) if keeps_copies(context) else 0
    share_given = memory_share(config, context)
    given = total * share_given / num_shared
    is_auto = SHARE in context.planned_options or config.gpu_memory_utilization == "auto"
    told = f"{AUTO_IS if is_auto else ''}{share_given} of {gib(total)}"
    kv_bytes = size.kv_bytes(longest, CUDA_BLOCK_TOKENS)
    recorded = 0 if context.replays_routing else recorder_bytes(config.max_num_seqs, longest)
    needed = size.weights + kv_bytes + recorded
    if needed > given:
        shared = f", shared by {num_shared} engines" if num_shared > 1 else ""
        remedy = _share_remedy(context, needed * num_shared / total)
        yield section_problem(
            SHARE,
            f"{told}{shared}, which gives an engine {gib(given)}",
            f"more than {gib(needed)}: {gib(size.weights)} of weights, {gib(kv_bytes)} of KV cache for one sequence of "
            f"{longest} tokens and {gib(recorded)} of log-probabilities (by max_num_seqs), besides activations",
            f"{remedy}, or: {SHORTER}" if kv_bytes > size.weights else f"{remedy}.",
        )

    elif copies and copies + num_shared * given > total:
        share = math.floor(100 * (total - copies) / total) / 100
        remedy = f"Set it to at most {share:g}, or refit.delta" if share * total >= needed * num_shared else "Set refit.delta"
        yield section_problem(
            SHARE,
            f'{told}, with refit.delta = "device" over {context.channel}',
            f"what leaves room for copies of weights: {gib(copies)} of a device, which vLLM does not count",
            f'{remedy} = "host".',
        )


def _engine_size(dims: ModelDims, dtype: DtypeName, config: VllmConfig) -> ModelSize:
    """The size of the model and of what drafts for it."""
    ranks = config.tensor_parallel
    eight_bits = {"fp8": config.quantization != "none", "fp8_cache": config.kv_cache_dtype == "fp8"}
    size, drafter = model_size(dims, dtype, tensor_parallel=ranks, **eight_bits), drafter_dims(config)
    if drafter is None:
        return size
    added = model_size(drafter, dtype, tensor_parallel=ranks)
    return ModelSize(weights=size.weights + added.weights, kv_per_token=size.kv_per_token + added.kv_per_token)


def _share_remedy(context: CheckContext, share: float) -> str:
    """Name the remedy where engines need this share of a device and have less."""
    is_shared = context.channel is not None and find_channel(context.channel).reach != "separate"
    if SHARE in context.planned_options and is_shared:
        return BESIDE_TRAINER
    return f"Set it to more than {_rounded_up(share)}" if share < 0.95 else "Raise tensor_parallel, with more devices"


def _rounded_up(value: float) -> str:
    """The value rounded up to two decimal places."""
    return f"{math.ceil(value * 100) / 100:g}"


def section_problem(key: str, found: object, expected: str, remedy: str = "") -> Problem:
    """With a key of the section."""
    return Problem(path=f"{SECTION}.{key}", found=str(found), expected=expected, remedy=remedy)
