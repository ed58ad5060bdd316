"""The entry point: describes the trainer without importing torch or Megatron."""

from rlcore.spi import Provider, capabilities
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_megatron.setup.requirements import missing_requirement
from rlcore_torchkit.huggingface.batch_invariance import shared_kernels as invariant_kernels
from rlcore_torchkit.requirements import TRAINER_CAPABILITIES


def disabled_capabilities(config: MegatronConfig) -> frozenset[str]:
    """Return the capabilities that a section rules out: products in 8 or 4 bits, and TransformerEngine's in float32, which are
    TF32, give other log-probabilities than a plain pass; steps in pieces have no losses of routers."""
    rounds = config.fp8 or config.transformer_engine or config.transformer.get("fp4")
    disabled = {capabilities.EXACT_LOGPROBS} if rounds else set[str]()
    # A router's loss is a mean over the tokens of the step, which no piece of it knows.
    if any(config.transformer.get(name) for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff")):
        disabled.add(capabilities.SPLIT_STEP)
    if config.optimizer.get(
        "optimizer_cpu_offload"
    ):  # keeps weights on the host that a change of adapters would have to follow
        disabled.add(capabilities.MANY_ADAPTERS)
    return frozenset(disabled)


def shared_kernels(config: MegatronConfig) -> str | None:
    """The kernels of an engine that computes each token by the same instructions in every batch."""
    return invariant_kernels(config.batch_invariant_parts) if config.batch_invariant else None


PROVIDER = Provider(
    name="megatron",
    spi=(2, 0),
    priority=80,
    capabilities=TRAINER_CAPABILITIES
    | {capabilities.IMAGES, capabilities.SHARDS, capabilities.LORA, capabilities.ADAPTER_REFIT, capabilities.DELTA_REFIT}
    | {capabilities.MUON, capabilities.MOMENTS_8BIT, capabilities.OPTIMIZER_GROUPS}
    | {capabilities.SPLIT_STEP, capabilities.MANY_ADAPTERS, capabilities.GRADIENT_NORMS},
    config=MegatronConfig,
    # Without a GPU it runs where it is named; what fits a CPU trains faster without Megatron around it.
    devices={"cuda"},
    unavailable=missing_requirement,
    disabled_capabilities=disabled_capabilities,
    shared_kernels=shared_kernels,
    backend="rlcore_megatron.backend:MegatronBackend",
    check="rlcore_megatron.checks.check:check",
    plan="rlcore_megatron.layouts.plan:plan",
)
