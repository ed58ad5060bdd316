"""The checks of a layout that need the model's configuration, which may be on the Hub."""

from rlcore.spi import ConfigError, TrainerContext
from rlcore_fsdp2.config import Fsdp2Config
from rlcore_fsdp2.invariance_check import OPTION
from rlcore_fsdp2.layout_check import layout_problems, reference_layout_problems, undescribed_problems
from rlcore_torchkit.architectures.decoders import described_family, is_image_model
from rlcore_torchkit.huggingface.batch_invariance import invariant_model_problems
from rlcore_torchkit.huggingface.models import load_config


def check_layout(context: TrainerContext, config: Fsdp2Config) -> None:
    """Check what `check` could not see of a model on the Hub. ConfigError with all that is wrong."""
    rank_info, content = context.rank_info, load_config(context.model, context.head, any_decoder=True).to_dict()
    family = described_family(content)
    model = None if family is None else family.standard(content)
    own_layout_problems = layout_problems if context.needs_policy else reference_layout_problems
    problems = list(own_layout_problems(config, rank_info.world_size, rank_info.device, model))
    problems += undescribed_problems(config, content, has_plan=not is_image_model(content)) if family is None else []
    if config.batch_invariant:
        problems += invariant_model_problems(OPTION, content, context.model.path, config.batch_invariant_parts)
    if problems:
        raise ConfigError(problems)
