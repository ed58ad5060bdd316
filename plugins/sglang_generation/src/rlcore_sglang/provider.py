"""The entry point: describes the generator without importing torch or SGLang."""

from operator import attrgetter

from rlcore.gpu import has_gpu
from rlcore.spi import Provider, capabilities
from rlcore_sglang.config import SglangConfig
from rlcore_sglang.requirements import unavailable

EXACT = frozenset() if has_gpu() else frozenset({capabilities.EXACT_LOGPROBS})
"""Held against transformers on CPUs alone."""

ROUNDING_ARGUMENTS = (
    "quantization",
    "quantization_param_path",
    "modelopt_quant",
    "torchao_config",
    "kv_cache_dtype",
    "mamba_ssm_dtype",
    "json_model_override_args",
)
"""Arguments of ServerArgs that may have it compute something else than the trainer's model in model.dtype."""


def disabled_capabilities(config: SglangConfig) -> frozenset[str]:
    """Return the capabilities that a section rules out: exactness where weights or the KV cache may be quantised."""
    return EXACT if any(map(config.engine.get, ROUNDING_ARGUMENTS)) else frozenset()


PROVIDER = Provider(
    name="sglang",
    spi=(2, 0),
    priority=50,
    capabilities={
        capabilities.STREAMING,
        capabilities.RESIDENCY,
        capabilities.DISCARD_WEIGHTS,
        capabilities.OWN_WEIGHTS,
        "refit.shared_memory",
        "refit.directory",
        *EXACT,
    },
    config=SglangConfig,
    # It has to be named: on CPU others are faster, and on GPUs little of it has been tried.
    devices=frozenset(),
    unavailable=unavailable,
    disabled_capabilities=disabled_capabilities,
    num_devices=attrgetter("tensor_parallel"),
    backend="rlcore_sglang.backend:SglangBackend",
    check="rlcore_sglang.check:check",
)
"""The provider, which the entry point names."""
