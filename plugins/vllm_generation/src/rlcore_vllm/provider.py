"""The entry point: describes the generator without importing torch or vLLM."""

from operator import attrgetter

from rlcore.spi import ChannelProvider, Provider, capabilities
from rlcore_torchkit.huggingface.batch_invariance import shared_kernels as invariant_kernels
from rlcore_torchkit.json_schema import STRUCTURED_OUTPUT
from rlcore_vllm.setup.config import ROUNDING_ARGUMENTS, VllmConfig
from rlcore_vllm.setup.requirements import meant_for, unavailable
from rlcore_vllm.setup.speculation import lost_capabilities

TRAINER_DEVICE = 0
ROUTED_EXPERTS = frozenset({capabilities.ROUTED_EXPERTS}) if "cuda" in meant_for() else frozenset()
"""Empty in builds for CPUs: vLLM reads experts off in the runner that needs Triton."""


def disabled_capabilities(config: VllmConfig) -> frozenset[str]:
    """Return the capabilities that a section rules out: channels that its layout has no use for, exactness where weights or the
    KV cache are quantised or an argument of the engine's may round, unmerged adapters with weights that are quantised or that
    followers take over too, and those that speculation leaves no place for."""
    shares_device = config.devices is None or TRAINER_DEVICE in config.devices
    is_out_of_reach = {
        (capabilities.IN_PROCESS, capabilities.PROCESS_CHANNELS): config.replicas > 1 or config.tensor_parallel > 1,
        # Every engine has to see the trainer's device.
        (capabilities.SHARED_CHANNELS,): (
            config.devices is not None and not (shares_device and len(config.devices) == config.tensor_parallel)
        ),
        (capabilities.SHARDS, capabilities.SEPARATE_CHANNELS): shares_device,
    }
    names = {name for lost, is_lost in is_out_of_reach.items() if is_lost for name in lost}
    if config.quantization != "none" or config.followers:
        names |= {capabilities.ADAPTER_REFIT, capabilities.MANY_ADAPTERS}  # followers have no room for adapters
    if config.is_quantized or any(map(config.engine.get, ROUNDING_ARGUMENTS)):
        names.add(capabilities.EXACT_LOGPROBS)
    return frozenset(names) | lost_capabilities(config)


def shared_kernels(config: VllmConfig) -> str | None:
    """The kernels that a trainer may have too."""
    return invariant_kernels(config.tensor_parallel) if config.batch_invariant else None


PROVIDER = Provider(
    name="vllm",
    spi=(2, 0),
    priority=80,
    capabilities={
        *capabilities.SAMPLING,
        *STRUCTURED_OUTPUT,
        capabilities.RESIDENCY,
        capabilities.DISCARD_WEIGHTS,
        capabilities.STREAMING,
        capabilities.CONTINUOUS,
        capabilities.TOKEN_STREAMING,
        capabilities.PROMPT_LOGPROBS,
        capabilities.IN_FLIGHT_REFIT,
        capabilities.SAMPLING_MASK,
        capabilities.IMAGES,
        capabilities.OWN_WEIGHTS,
        capabilities.ADAPTER_REFIT,
        capabilities.MANY_ADAPTERS,
        capabilities.DELTA_REFIT,
        *ROUTED_EXPERTS,
        *capabilities.ANY_CHANNEL,
        capabilities.IN_PROCESS,
        capabilities.SHARDS,
    },
    config=VllmConfig,
    # On CPU it can be named; what fits a CPU generates faster without an engine around it.
    devices={"cuda"},
    unavailable=unavailable,
    disabled_capabilities=disabled_capabilities,
    shared_kernels=shared_kernels,
    num_devices=attrgetter("tensor_parallel"),
    backend="rlcore_vllm.backend:VllmBackend",
    check="rlcore_vllm.checks.check:check",
    plan="rlcore_vllm.checks.plan:plan",
    planned_options={"gpu_memory_utilization"},
    tool_parser="rlcore_vllm.engines.tool_calls:tool_parser",
)
"""The provider, which the entry point names."""
NCCL = ChannelProvider(
    name="nccl",
    spi=(2, 0),
    # Buckets are broadcast from the trainer's GPU to every receiver at once.
    cost=20,
    devices={"cuda"},
    reach="separate",
    sender="rlcore_vllm.channels.nccl:Sender",
    receiver="rlcore_vllm.channels.nccl:Receiver",
)
"""The channel nccl, whose communicator is vLLM's."""
