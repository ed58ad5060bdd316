"""The entry point: describes the generator without importing torch or vLLM."""

from operator import attrgetter

from rlcore.spi import Provider, capabilities
from rlcore_vllm.config import VllmConfig
from rlcore_vllm.requirements import meant_for, unavailable

TRAINER_DEVICE = 0
WIDE_CACHES = ("auto", "bfloat16", "float16")
"""Values of vLLM's kv_cache_dtype that hold keys and values as the model computes them."""
ROUTED_EXPERTS = frozenset({capabilities.ROUTED_EXPERTS}) if "cuda" in meant_for() else frozenset()
"""Of the builds for CPUs none reports them: vLLM reads them off in the runner that needs Triton."""


def without(config: VllmConfig) -> frozenset[str]:
    """What a section rules out: ways to refit that its layout has no use for, and exactness where weights or the KV cache are
    quantised."""
    names = set()
    if config.replicas > 1 or config.tensor_parallel > 1:
        names.add(capabilities.REFIT_IN_PROCESS)
    shares_device = config.devices is None or TRAINER_DEVICE in config.devices
    if config.devices is not None and not (shares_device and len(config.devices) == config.tensor_parallel):
        names.add(capabilities.REFIT_CUDA_IPC)  # an engine maps the trainer's memory on a device that it sees
    if shares_device:
        names.add(capabilities.REFIT_NCCL)
    if config.quantization != "none" or config.engine.get("kv_cache_dtype", "auto") not in WIDE_CACHES:
        names.add(capabilities.EXACT_LOGPROBS)
    return frozenset(names)


PROVIDER = Provider(
    name="vllm",
    spi=(2, 0),
    priority=80,
    capabilities={
        capabilities.TOP_K,
        capabilities.TOP_P,
        capabilities.STOP_STRINGS,
        capabilities.PER_SAMPLE_SEEDS,
        capabilities.EXACT_LOGPROBS,
        capabilities.RESIDENCY,
        capabilities.DISCARD_WEIGHTS,
        capabilities.STREAMING,
        capabilities.IN_FLIGHT_REFIT,
        *ROUTED_EXPERTS,
        capabilities.REFIT_IN_PROCESS,
        capabilities.REFIT_SHARED_MEMORY,
        capabilities.REFIT_CUDA_IPC,
        capabilities.REFIT_NCCL,
        capabilities.REFIT_DIRECTORY,
    },
    config=VllmConfig,
    # On CPU it can be named; what fits a CPU generates faster without an engine around it.
    devices={"cuda"},
    unavailable=unavailable,
    disabled_capabilities=without,
    num_devices=attrgetter("tensor_parallel"),
    backend="rlcore_vllm.backend:VllmBackend",
    check="rlcore_vllm.check:check",
    serve="rlcore_vllm.serve:serve",
)
"""What the entry point names."""
