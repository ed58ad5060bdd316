"""The entry point: describes the generator without importing torch or SGLang."""

from operator import attrgetter

from rlcore.gpu import has_gpu
from rlcore.spi import Provider, capabilities
from rlcore_sglang.config import SglangConfig
from rlcore_sglang.requirements import unavailable

EXACT = frozenset() if has_gpu() else frozenset({capabilities.EXACT_LOGPROBS})
"""Held against transformers on CPUs alone."""

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
    num_devices=attrgetter("tensor_parallel"),
    backend="rlcore_sglang.backend:SglangBackend",
    check="rlcore_sglang.check:check",
)
"""What the entry point names."""
