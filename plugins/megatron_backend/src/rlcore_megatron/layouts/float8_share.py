"""The products in 8 bits under `fp8`, by the section's values of Megatron's own fields; imports no Megatron."""

from attrs import evolve

from rlcore_megatron.setup.config import MegatronConfig
from rlcore_torchkit.architectures.dims import ModelDims


def wide_layers(config: MegatronConfig) -> tuple[int, int]:
    """Return the number of layers at the start and at the end of a model that compute in bfloat16 all the same."""
    if not config.transformer.get("first_last_layers_bf16", False):
        return 0, 0
    at_start, at_end = (config.transformer.get(f"num_layers_at_{side}_in_bf16", 1) for side in ("start", "end"))
    return int(at_start), int(at_end)


def weight_gradients_are_narrow(config: MegatronConfig) -> bool:
    """Return whether weights' gradients are products of 8 bits too: `fp8_wgrad` counts with delayed scaling alone, the
    default."""
    is_delayed = config.transformer.get("fp8_recipe", "delayed") == "delayed"
    return not is_delayed or bool(config.transformer.get("fp8_wgrad", True))


def narrow_dims(dims: ModelDims, config: MegatronConfig) -> ModelDims:
    """The model without the layers that compute in bfloat16, embedding and head."""
    return evolve(dims.without_ends(*wide_layers(config)), vocab_size=0)
