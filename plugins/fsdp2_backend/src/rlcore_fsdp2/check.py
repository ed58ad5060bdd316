"""Checks of the trainer's options and model before anything is allocated."""

import shutil
from collections.abc import Iterator, Sequence
from functools import partial

from attrs import evolve

from rlcore.model_files import read_object
from rlcore.spi import CheckContext, Note, Problem
from rlcore_fsdp2.config import Fsdp2Config
from rlcore_fsdp2.invariance_check import batch_invariance_problems
from rlcore_fsdp2.layout_check import (
    SECTION,
    layout_problems,
    option_problem,
    reference_layout_problems,
    undescribed_problems,
)
from rlcore_fsdp2.optimizer_check import optimizer_problems
from rlcore_torchkit.adapters.lora_targets import lora_problems
from rlcore_torchkit.architectures.decoders import described_family, has_layout_plan, is_image_model, length_problems
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.huggingface.model_check import (
    config_file,
    float8_notes,
    model_config,
    reference_problems,
    routing_problems,
    trained_model_problems,
)
from rlcore_torchkit.optimizer.settings import optimizer_section

COMPILERS = ("g++", "clang++", "c++")
"""Compilers by which torch.compile builds its kernels' launchers."""


def check(context: CheckContext, config: Fsdp2Config) -> Sequence[Problem | Note]:
    """Return all problems of the configuration at once; notes where there is none."""
    own_layout_problems = layout_problems if context.needs_policy else reference_layout_problems
    of_model = [*trained_model_problems(context, any_decoder=True), *_undescribed_problems(context, config)]
    problems = [
        *of_model,
        *lora_problems(context),
        *optimizer_problems(context, config, is_sound=not of_model),
        *own_layout_problems(config, context.world_size, context.device, model_config(context)),
        *reference_problems(
            context, partial(reference_layout_problems, config, context.world_size, context.device), any_decoder=True
        ),
        *_adapter_problems(context, config),
        *_replay_problems(context, config),
        *_image_problems(context, config),
        *_compiler_problems(config),
        *batch_invariance_problems(context, config),
        *_float64_problems(context, config),
    ]
    return problems or list(_notes(context, config))


def _notes(context: CheckContext, config: Fsdp2Config) -> Iterator[Note]:
    model = model_config(context)
    dims = None if model is None else ModelDims.of(model)
    if config.fp8 and context.device == "cuda" and dims is not None:
        yield from float8_notes(f"{SECTION}.fp8", dims)


def _undescribed_problems(context: CheckContext, config: Fsdp2Config) -> Iterator[Problem]:
    """Refuse options for a model that computes by its own class, the policy's or the frozen one of [reference]."""
    yield from _undescribed_model_problems(context, config)
    if context.reference is not None:
        reference = evolve(context, model=context.reference, replays_routing=False)
        content = read_object(config_file(reference))
        # Ranks that share the policy's layers or tokens each compute all of such a model, unless it reads images.
        divides = not isinstance(content, Problem) and is_image_model(content)
        alone = evolve(config, tensor_parallel=1, expert_parallel=1, context_parallel=config.context_parallel if divides else 1)
        yield from _undescribed_model_problems(reference, alone)


def _undescribed_model_problems(context: CheckContext, config: Fsdp2Config) -> Iterator[Problem]:
    file = config_file(context)
    content = read_object(file)
    if isinstance(content, Problem) or described_family(content, str(file)) is not None:
        return
    has_plan = config.tensor_parallel == 1 or (not is_image_model(content) and has_layout_plan(content))
    yield from undescribed_problems(config, content, f"model_type {content.get('model_type')}", has_plan=has_plan)
    yield from length_problems(content, str(file), context.max_sequence_length)
    if context.replays_routing:
        found = f"true, for model_type {content.get('model_type')}"
        remedy = "No description of its family says how its routers choose"
        yield Problem(path="rollout.replay_routing", found=found, expected="false", remedy=remedy)


def _adapter_problems(context: CheckContext, config: Fsdp2Config) -> Iterator[Problem]:
    """Adapters beside layers that torchao puts others in the place of."""
    if context.lora is not None and config.fp8:
        yield option_problem("fp8", "true, with [lora]", "false", "Adapters are beside layers that float8 replaces")


def _replay_problems(context: CheckContext, config: Fsdp2Config) -> Iterator[Problem]:
    """Routers that are not there to be told, or that a compiler has merged with what is around them."""
    if not context.replays_routing:
        return
    yield from routing_problems(model_config(context), context.model.path)
    if config.compile_layers:
        remedy = "Or set rollout.replay_routing to false"
        yield option_problem("compile_layers", "true, with rollout.replay_routing", "false", remedy)


def _image_problems(context: CheckContext, config: Fsdp2Config) -> Iterator[Problem]:
    """A vision tower to freeze that is not there, and adapters of a model that has one."""
    content = read_object(config_file(context))
    if isinstance(content, Problem):
        return
    is_image = is_image_model(content)
    if config.freeze == "vision" and not is_image:
        yield option_problem("freeze", f'"vision", for model_type {content.get("model_type")}', '"none"', "It reads text alone")
    if context.lora is not None and is_image:
        remedy = 'Leave it out, and train less with trainer.fsdp2.freeze = "vision"'
        yield Problem(path="lora", found="the section, with a model that reads images", expected="no adapters", remedy=remedy)


NOT_IN_FLOAT64 = {
    "fp8": "Its products have 8 bits",
    "batch_invariant": "Its kernels compute in bfloat16",
    "compile_layers": "A compiled layer keeps the float32 of its code",
}
"""Options that compute in a narrower dtype than float64, with the reason."""


def _float64_problems(context: CheckContext, config: Fsdp2Config) -> Iterator[Problem]:
    if context.model.dtype != "float64":
        return
    for option, reason in NOT_IN_FLOAT64.items():
        if getattr(config, option):
            yield option_problem(option, 'true, with model.dtype = "float64"', "false", reason)
    if context.optimizer is not None and context.optimizer.moments == "8bit":
        found, section = '"8bit", with model.dtype = "float64"', optimizer_section(context)
        yield Problem(path=f"{section}.moments", found=found, expected='"float32"', remedy="Moments are then float64")


def _compiler_problems(config: Fsdp2Config) -> Iterator[Problem]:
    if config.compile_layers and not any(map(shutil.which, COMPILERS)):
        expected = f"one of {', '.join(COMPILERS)} on the PATH"
        yield option_problem("compile_layers", "true, but no C++ compiler", expected, "Install one, or set it to false")
