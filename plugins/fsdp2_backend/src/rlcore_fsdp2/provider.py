"""The entry point: describes the trainer without importing torch."""

from rlcore.spi import Provider, capabilities
from rlcore_fsdp2.config import Fsdp2Config
from rlcore_torchkit.huggingface.batch_invariance import shared_kernels as invariant_kernels
from rlcore_torchkit.requirements import TRAINER_CAPABILITIES, missing_requirement


def shared_kernels(config: Fsdp2Config) -> str | None:
    """The kernels of an engine that computes each token by the same instructions in every batch."""
    return invariant_kernels(config.batch_invariant_parts) if config.batch_invariant else None


def disabled_capabilities(config: Fsdp2Config) -> frozenset[str]:
    """Return the capabilities that a section rules out: products in 8 bits give other log-probabilities than a plain pass."""
    return frozenset({capabilities.EXACT_LOGPROBS}) if config.fp8 else frozenset()


PROVIDER = Provider(
    name="fsdp2",
    spi=(2, 0),
    priority=50,
    capabilities=TRAINER_CAPABILITIES
    | {
        capabilities.SHARDS,
        capabilities.SPLIT_STEP,
        capabilities.GRADIENT_NORMS,
        capabilities.LORA,
        capabilities.MANY_ADAPTERS,
        capabilities.ADAPTERS_TOGETHER,
        capabilities.ADAPTER_REFIT,
        capabilities.DELTA_REFIT,
        capabilities.IMAGES,
        capabilities.MUON,
        capabilities.MOMENTS_8BIT,
        capabilities.OPTIMIZER_GROUPS,
    },
    dtypes={"float64", "float32", "bfloat16", "float16"},
    config=Fsdp2Config,
    unavailable=missing_requirement,
    disabled_capabilities=disabled_capabilities,
    shared_kernels=shared_kernels,
    backend="rlcore_fsdp2.backend:Fsdp2Backend",
    check="rlcore_fsdp2.check:check",
    plan="rlcore_fsdp2.plan:plan",
)
