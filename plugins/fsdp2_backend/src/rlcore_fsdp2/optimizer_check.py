"""Checks of `[optimizer]`, or of a critic's, against the model that it will train, before anything is allocated."""

from collections.abc import Iterator

from rlcore.schema.file_limits import expanded
from rlcore.spi import CheckContext, ModelError, OptimizerSpec, Problem
from rlcore_fsdp2.config import Fsdp2Config
from rlcore_torchkit.optimizer.settings import missing_torchao, optimizer_section

INSTALL = "rlcore-fsdp2[8bit]"


def optimizer_problems(context: CheckContext, config: Fsdp2Config, *, is_sound: bool) -> Iterator[Problem]:
    """Refuse moments in 8 bits without torchao, and settings of tensors that the trainer's build would refuse.

    Tensors are compared where the model `is_sound` and transformers has its class. Of a model on the Hub, and of adapters, the
    build tells.
    """
    spec = context.optimizer
    if spec is None or not context.needs_policy:
        return
    section = optimizer_section(context)
    yield from missing_torchao(spec, INSTALL, section)
    is_local = expanded(context.model.path).is_dir() and not context.model.trust_remote_code
    if is_sound and is_local and context.lora is None and (spec.groups or spec.name == "muon"):
        yield from _tensor_problems(context, spec, config, section)


def _tensor_problems(context: CheckContext, spec: OptimizerSpec, config: Fsdp2Config, section: str) -> Iterator[Problem]:
    from rlcore_fsdp2.policy import empty_policy
    from rlcore_fsdp2.trained_parameters import settings_problems

    try:
        model, exporter = empty_policy(context.model, config, context.head)
        yield from settings_problems(model, exporter.exported, spec, section)
    except ModelError:  # of which the model's own checks tell
        return
