"""Estimate the reward model's memory on a device from its config.json, for `rlcore plan` and for the memory of engines."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.model_files import CONFIG_FILE, read_object
from rlcore.schema.file_limits import expanded
from rlcore.spi import ModelError, PlanContext, PlanOption
from rlcore.spi.weights import ITEM_BYTES
from rlcore_reward_model.config import RewardModelConfig
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.trainer.step_costs import layer_parameters
from rlcore_torchkit.trainer.trainer_plan import planned_model

PROCESS_BYTES = 2**30
"""Bytes of the process beside the model: its CUDA context, workspaces of kernels, and what the allocator rounds up."""


def plan(context: PlanContext, config: RewardModelConfig) -> Sequence[PlanOption]:
    """The model's weights and what it needs to score `max_batch` of the longest answers; nothing on a CPU or behind servers."""
    if config.device == "cpu" or config.base_urls:
        return ()
    model = known_model(config)
    if model is None:
        text = f"reward_model: the size of {config.path} is not known without a config.json here, and not counted."
        return (PlanOption(memory={}, seconds={}, assumptions=(text,)),)
    content, dims = model
    item = ITEM_BYTES[config.dtype]
    longest = min(context.max_sequence_length, content.get("max_position_embeddings") or context.max_sequence_length)
    memory = {
        "reward model's weights": int((sum(layer_parameters(dims)) + dims.vocab_size * dims.hidden_size) * item),
        "reward model's work": PROCESS_BYTES + int(_pass_bytes(dims, config.max_batch, longest, item)),
    }
    return (PlanOption(memory=memory, seconds={}),)


def known_model(config: RewardModelConfig) -> tuple[Mapping[str, Any], ModelDims] | None:
    """The content of the reward model's config.json and its sizes; None where they are not here, as for a name on the Hub."""
    content = read_object(expanded(config.path) / CONFIG_FILE)
    if not isinstance(content, dict):
        return None
    try:
        model = planned_model(content)
    except ModelError:
        return None
    return model.config, model.dims


def _pass_bytes(dims: ModelDims, num_sequences: int, length: int, item: int) -> float:
    """Bytes of one layer's pass over a padded batch, and of the mask over all pairs of its positions, as booleans and as what
    attention adds."""
    width = 6 * dims.hidden_size + 3 * max(dims.intermediate_size, dims.moe_intermediate_size * dims.num_experts_per_token)
    return num_sequences * (length * width * item + length**2 * (1 + item))
