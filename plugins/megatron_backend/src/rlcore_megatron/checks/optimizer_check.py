"""Checks of `[optimizer]` where tensors have settings of their own, and of Megatron's options that have no effect then."""

from collections.abc import Iterator, Mapping
from typing import Any

from rlcore.spi import CheckContext, Head, LoraSpec, ModelError, OptimizerSpec, Problem, TrainerContext
from rlcore_megatron.families.family import MegatronFamily
from rlcore_megatron.families.models import find_family, load_config
from rlcore_megatron.families.vision_weights import vision_sources
from rlcore_megatron.families.weight_mapping import SHARED
from rlcore_megatron.layouts.layout_check import option_problem
from rlcore_megatron.setup.config import MegatronConfig, has_tensor_settings
from rlcore_torchkit.adapters.lora_targets import adapted_layers, adapter_shapes
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.huggingface.model_check import config_file
from rlcore_torchkit.optimizer.settings import effect_problems, group_problems, missing_torchao, optimizer_section

INSTALL = "rlcore-megatron[8bit]"
EFFECTIVE = ("barrier_with_L1_time", "config_logger_dir", "log_num_zeros_in_grad", "reuse_grad_buf_for_mxfp8_param_ag")
"""Fields of OptimizerConfig that have their effect whatever steps; the others are of Megatron's own step, or set one rate."""
OF_DECAY = ("start_wd", "end_wd", "wd_incr_steps", "wd_incr_style")
"""Fields of OptimizerParamScheduler for one weight decay of all tensors."""


def optimizer_problems(context: CheckContext, config: MegatronConfig, model: Mapping[str, Any] | None) -> Iterator[Problem]:
    """Refuse what the optimizer needs and is not there, patterns that match nothing, and tables that it would not read."""
    spec = context.optimizer
    if spec is None or not context.needs_policy or not has_tensor_settings(spec):
        return
    section = optimizer_section(context)
    yield from missing_torchao(spec, INSTALL, section)
    yield from _table_problems(spec, config, section)
    family = None if model is None else find_family(model, str(config_file(context)))
    if model is not None and isinstance(family, MegatronFamily):
        yield from pattern_problems(context, config, family, model, section)


def pattern_problems(
    context: CheckContext | TrainerContext,
    config: MegatronConfig,
    family: MegatronFamily,
    model: Mapping[str, Any],
    section: str = "optimizer",
) -> Iterator[Problem]:
    """Refuse groups' patterns that match none of the model's tensors, and keys of groups without effect."""
    dims = ModelDims.of(model)
    if context.optimizer is not None and context.optimizer.groups and dims is not None:
        tensors = trained_tensors(family, dims, context.head, context.lora, mtp=config.mtp)
        if family.reads_images and config.freeze != "vision" and context.lora is None:
            try:
                hf = load_config(context.model, context.head)
            except ModelError:  # of which the model's own checks tell
                return
            tensors |= {
                tensor.file_name: (tensor.file_shape, False) for source in vision_sources(hf) for tensor in source.tensors
            }
        yield from group_problems(context.optimizer, tensors, section)
        yield from effect_problems(context.optimizer, tensors, section)


def trained_tensors(
    family: MegatronFamily, dims: ModelDims, head: Head, lora: LoraSpec | None, *, mtp: bool
) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Return the shape of each tensor that trains, by its name in exports and files, and whether a layer of the decoder has
    it."""
    if lora is not None:
        adapters = adapter_shapes(adapted_layers(family, dims, lora), lora.rank)
        return {name: (tuple(shape), False) for name, shape in adapters.items()}
    table = family.table(family, dims)
    trunk = list(table.sources(head))
    ahead = [source for source in (table.multi_token_head() if mtp else ()) if source.parameter not in SHARED]
    return {
        tensor.file_name: (tensor.file_shape, source.layer is not None)
        for source in (*trunk, *ahead)
        if source.trains
        for tensor in source.tensors
    }


def _table_problems(spec: OptimizerSpec, config: MegatronConfig, section: str) -> Iterator[Problem]:
    """Refuse fields of Megatron's classes that would have no effect, or another one than they say."""
    keys = {"name": spec.name != "adamw", "moments": spec.moments != "float32", "groups": bool(spec.groups)}
    reason = f"[{section}] sets {', '.join(key for key, is_set in keys.items() if is_set)}, which its own step computes"
    for key in config.optimizer:
        if key not in EFFECTIVE:
            yield option_problem(f"optimizer.{key}", repr(config.optimizer[key]), "no such field", f"Leave it out: {reason}")
    for key in config.scheduler:
        if key in OF_DECAY:
            remedy = f"Leave it out: {reason} with the weight decay of each tensor"
            yield option_problem(f"scheduler.{key}", repr(config.scheduler[key]), "no such field", remedy)
