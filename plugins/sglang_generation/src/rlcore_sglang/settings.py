"""SGLang's arguments, from the context and the recipe's section."""

from typing import Any

from rlcore.spi import GeneratorContext
from rlcore_sglang.config import SglangConfig

CPU_CACHED_TOKENS = 2**16
SLACK = 8
"""Positions beyond the longest sequence: SGLang keeps some to itself."""
OWN_ARGUMENTS = frozenset(
    {
        "attention_backend",
        "base_gpu_id",
        "context_length",
        "custom_weight_loader",
        "device",
        "dp_size",
        "dtype",
        "enable_memory_saver",
        "enable_weights_cpu_backup",
        "load_format",
        "max_running_requests",
        "max_total_tokens",
        "mem_fraction_static",
        "model_path",
        "pp_size",
        "random_seed",
        "revision",
        "skip_tokenizer_init",
        "tp_size",
        "trust_remote_code",
    }
)
"""Arguments of ServerArgs that are set here, or that this generator has no room for."""


def engine_arguments(context: GeneratorContext, config: SglangConfig) -> dict[str, Any]:
    """The arguments of ServerArgs."""
    from rlcore_sglang.scheduler import LOADER

    model, device = context.model, context.rank_info.device
    on_cpu = device == "cpu"
    arguments = {
        "model_path": model.path,
        "revision": model.revision,
        "trust_remote_code": model.trust_remote_code,
        "dtype": model.dtype,
        "device": device,
        "base_gpu_id": 0 if on_cpu else (context.devices or (context.rank_info.local_rank,))[0],
        "tp_size": config.tensor_parallel,
        "context_length": context.max_sequence_length + SLACK,
        "attention_backend": config.attention_backend or ("torch_native" if on_cpu else None),
        "mem_fraction_static": config.mem_fraction_static,
        "max_total_tokens": config.max_total_tokens or (CPU_CACHED_TOKENS if on_cpu else None),
        "max_running_requests": config.max_running_requests,
        "skip_tokenizer_init": True,
        "load_format": "auto" if context.channel is None else "dummy",
        "custom_weight_loader": [LOADER],
        "enable_memory_saver": not on_cpu,
        # Memory that is released loses its content otherwise.
        "enable_weights_cpu_backup": not on_cpu,
        "random_seed": context.seed % 2**31,
        "log_level": "warning",
    }
    return {name: value for name, value in arguments.items() if value is not None} | dict(config.engine)
