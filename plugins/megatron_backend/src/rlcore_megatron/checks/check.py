"""Checks of the trainer's options and model before anything is allocated."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from attrs import evolve

from rlcore.gpu import device_memories
from rlcore.model_files import read_object
from rlcore.schema.file_limits import expanded
from rlcore.spi import CheckContext, ConfigError, Note, OptimizerSpec, Problem
from rlcore.spi.weights import ITEM_BYTES
from rlcore_megatron.checkpoints.cache_directory import cache_directory, directory_problems
from rlcore_megatron.checks.invariance_check import batch_invariance_problems
from rlcore_megatron.checks.multi_token_check import head_option_problems, head_problems
from rlcore_megatron.checks.optimizer_check import optimizer_problems
from rlcore_megatron.checks.passthrough_check import passthrough_problems
from rlcore_megatron.checks.scheduler_check import course_notes, course_problems
from rlcore_megatron.families.models import (
    FAMILIES,
    find_family,
    load_config,
    lora_problems,
    model_config,
    reference_problems,
    trained_model_problems,
)
from rlcore_megatron.layouts.auto_layout import choose
from rlcore_megatron.layouts.layout_check import (
    AUTO_SIZES,
    SECTION,
    family_option_problems,
    layout_problems,
    option_problem,
    reference_layout_problems,
)
from rlcore_megatron.layouts.memory import Workload
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_megatron.setup.requirements import PROVEN, broken_attention, transformer_engine_version, uses_transformer_engine
from rlcore_torchkit.architectures.decoders import IMAGE_MODELS
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.huggingface.model_check import config_file, float8_notes, routing_problems

FORMAT = "torch_dist"
METADATA = "metadata.json"


def check(context: CheckContext, config: MegatronConfig) -> Sequence[Problem | Note]:
    """All problems at once, but for those of one layer that would only repeat another's; notes where there is none."""
    model = model_config(context)
    dims = None if model is None else ModelDims.of(model)
    unfit = list(_image_problems(context)) or list(trained_model_problems(context))
    lora = list(_lora_problems(context, config))
    own_layout_problems = layout_problems if context.needs_policy else reference_layout_problems
    if (context.lora is not None or config.mtp) and not config.transformer_engine:
        config = evolve(config, transformer_engine=False)
    problems = [
        *lora,
        *(unfit if unfit or model is None else _family_problems(context, config, model)),
        *([] if model is None else _rotary_problems(context, model)),
        *_reference_family_problems(context, config),
        *own_layout_problems(config, context.world_size, context.device, model),
        *_reference_problems(context, config),
        *_engine_problems(context, config),
        *_replay_problems(context, config, model),
        *passthrough_problems(config, context.device, context.model.dtype, dims),
        *batch_invariance_problems(context, config),
        *optimizer_problems(context, config, model),
        *_checkpoint_problems(config),
        *_cache_problems(context, config, model),
        *_value_problems(context, config),
        *_critic_problems(context, config),
        *(head_option_problems(context, config) if context.needs_policy else ()),
    ]
    problems = problems or [
        *_auto_problems(context, config, model),
        *_transformer_problems(context, config, model),
        *course_problems(context, config),
    ]
    return problems or list(_notes(context, config, dims))


def _notes(context: CheckContext, config: MegatronConfig, dims: ModelDims | None) -> Iterator[Note]:
    if config.fp8 and dims is not None:
        yield from float8_notes(f"{SECTION}.fp8", dims)
    yield from course_notes(context, config)


def _image_problems(context: CheckContext) -> Iterator[Problem]:
    """Refuse a model whose images Megatron does not compute, or no attention over packed sequences does."""
    content, path = read_object(config_file(context)), str(config_file(context))
    model_type = None if isinstance(content, Problem) else content.get("model_type")
    if model_type == "gemma3":
        yield Problem(
            path=path,
            found="model_type gemma3, in which the tokens of an image see each other in both directions",
            expected="causal attention: no attention that Megatron-Core has for packed sequences takes another mask",
            remedy="Take its language model alone: python -m rlcore_torchkit.huggingface.language_model MODEL DIRECTORY",
        )
    elif model_type in IMAGE_MODELS and model_type not in FAMILIES:
        computed = [name for name in IMAGE_MODELS if name in FAMILIES]
        yield Problem(
            path=path,
            found=f"model_type {model_type}, which reads images",
            expected=f"for images one of {', '.join(computed)}",
            remedy='Set trainer.name to "fsdp2", which computes it',
        )


def _reference_problems(context: CheckContext, config: MegatronConfig) -> Iterator[Problem]:
    """Check the model in [reference], first for its images."""
    problems = [] if context.reference is None else list(_image_problems(evolve(context, model=context.reference)))
    layout = partial(reference_layout_problems, config, context.world_size, context.device)
    yield from problems or reference_problems(context, layout)


def _family_problems(context: CheckContext, config: MegatronConfig, model: Mapping[str, Any]) -> Iterator[Problem]:
    path = str(config_file(context))
    family = find_family(model, path)
    assert not isinstance(family, Problem), "a model of no family is unfit"
    yield from family.layer_problems(model, path)
    yield from family.head_problems(path, context.head)
    if context.lora is not None:
        yield from family.adapter_problems()
    yield from family_option_problems(family, config, context.device, context.model.dtype, trains=context.needs_policy)
    if context.needs_policy:
        yield from head_problems(family, config, model, path)


def _reference_family_problems(context: CheckContext, config: MegatronConfig) -> Iterator[Problem]:
    """Refuse a frozen model, held beside the policy, that Megatron's layers cannot be."""
    if context.reference is None or context.reference == context.model:
        return
    other = evolve(context, model=context.reference, reference=None)
    model, path = model_config(other), str(config_file(other))
    if model is None or list(trained_model_problems(other)):
        return  # which `reference_problems` tells
    family = find_family(model, path)
    assert not isinstance(family, Problem), "a model of no family is unfit"
    yield from family.layer_problems(model, path)
    yield from family_option_problems(family, config, other.device, other.model.dtype, trains=False)
    yield from _rotary_problems(other, model)


def _lora_problems(context: CheckContext, config: MegatronConfig) -> Iterator[Problem]:
    yield from lora_problems(context)
    if context.lora is not None and config.transformer.get("moe_shared_expert_overlap") and config.tensor_parallel != 1:
        found = f"true, with [lora] and tensor_parallel {config.tensor_parallel}"
        remedy = "Megatron gathers the shared expert's tokens itself then, and its adapters would gather them once more"
        yield option_problem("transformer.moe_shared_expert_overlap", found, "false, or tensor_parallel = 1", remedy)
    if context.lora is not None and config.fp8:
        yield option_problem("fp8", "true, with [lora]", "false", "Adapters are not computed in float8")
    if context.lora is not None and context.lora.dropout and config.recompute != "none" and config.pipeline_parallel != 1:
        found = f'{context.lora.dropout}, with recompute "{config.recompute}" and pipeline_parallel {config.pipeline_parallel}'
        expected = "0.0, or pipeline_parallel = 1: a stage computes a microbatch again when others have come between"
        yield Problem(path="lora.dropout", found=found, expected=expected, remedy='Or set recompute to "none"')


def _rotary_problems(context: CheckContext, model: Mapping[str, Any]) -> Iterator[Problem]:
    path = str(config_file(context))
    family = find_family(model, path)
    if isinstance(family, Problem):
        return
    scaling = family.rope or model.get("rope_parameters") or model.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in family.rotary:
        remedy = "Take another trainer for this model"
        expected = f"one of {', '.join(family.rotary)}"
        yield Problem(path=path, found=f'rope_type = "{kind}"', expected=expected, remedy=remedy)


def _engine_problems(context: CheckContext, config: MegatronConfig) -> Iterator[Problem]:
    """A TransformerEngine that is asked for and not there or not usable, or taken for granted and broken."""
    if config.transformer_engine and transformer_engine_version() is None:
        install = f"pip install --no-build-isolation 'transformer_engine[pytorch]=={PROVEN}'"
        yield option_problem(
            "transformer_engine", "true, but TransformerEngine is not installed", "it installed", f"{install}, or leave it out"
        )
    elif config.transformer_engine and context.device == "cpu":
        yield option_problem("transformer_engine", "true on cpu", "false", "Its kernels need a GPU")
    elif uses_transformer_engine(config, context.device, context.model.dtype) and (reason := broken_attention()):
        found = "true" if config.transformer_engine else "nothing, which takes the one installed"
        yield option_problem(
            "transformer_engine", f"{found}: {reason}", "a TransformerEngine that trains", "Or set it to false"
        )


def _replay_problems(context: CheckContext, config: MegatronConfig, model: Mapping[str, Any] | None) -> Iterator[Problem]:
    """Replayed routing in a model without routers, or with options by which routers ignore it."""
    if not context.replays_routing:
        return
    yield from routing_problems(model, context.model.path)
    remedy = "Or set rollout.replay_routing to false"
    if config.transformer.get("moe_router_fusion"):
        yield option_problem("transformer.moe_router_fusion", "true, whose kernel takes no routing", "false", remedy)
    modules = config.transformer.get("recompute_modules")
    if isinstance(modules, list | tuple) and "moe" in modules:
        found = '"moe", which runs the router again apart from its layer'
        yield option_problem("transformer.recompute_modules", found, "other modules", f'{remedy}, or recompute to "full"')


def _value_problems(context: CheckContext, config: MegatronConfig) -> Iterator[Problem]:
    """Weights in Megatron's format, which have the vocabulary's head."""
    for name in ("pretrained_checkpoint", "conversion_cache"):
        value = getattr(config, name)
        if context.head == "value" and value:
            found = f"{str(value).lower()}, with an algorithm that trains a model of values"
            yield option_problem(name, found, "no such key", "Megatron's format has the vocabulary's head")


def _critic_problems(context: CheckContext, config: MegatronConfig) -> Iterator[Problem]:
    """Sizes that would be chosen for a policy, or for its critic, as if it were alone: the two share devices and groups."""
    chosen = [name for name in AUTO_SIZES if getattr(config, name) == "auto"]
    if context.critic is not None and context.device == "cuda" and context.world_size > 1 and chosen:
        yield Problem(
            path=SECTION,
            found=f'{", ".join(chosen)} = "auto", with a critic beside the policy',
            expected="numbers, with which both fit on the devices together",
            remedy="Set them; those that are not needed to 1",
        )


def _checkpoint_problems(config: MegatronConfig) -> Iterator[Problem]:
    """Return whether `checkpoint` is what Megatron's dist_checkpointing wrote."""
    if config.pretrained_checkpoint is None:
        return
    if config.conversion_cache:
        remedy = "With checkpoint, nothing is converted from model.path"
        yield option_problem("conversion_cache", "true with checkpoint", "one of the two", remedy)
    directory = expanded(config.pretrained_checkpoint)
    expected = f"a Megatron distributed checkpoint: a directory whose {METADATA} names the format {FORMAT}"
    if not directory.is_dir():
        yield option_problem(
            "pretrained_checkpoint", f"{directory}, {'a file' if directory.exists() else 'which is not there'}", expected
        )
        return
    try:
        written = json.loads((directory / METADATA).read_text(encoding="utf-8"))
        found = f"format {written['sharded_backend']}"
    except (OSError, ValueError, KeyError, TypeError):
        written, found = None, f"no readable {METADATA}"
    if written is None or written["sharded_backend"] != FORMAT:
        inside = sorted(child.name for child in directory.glob("iter_*") if child.is_dir())
        remedy = f"Name the directory of one iteration, such as {directory / inside[-1]}" if inside else ""
        yield option_problem("pretrained_checkpoint", f"{directory} with {found}", expected, remedy)


def _cache_problems(context: CheckContext, config: MegatronConfig, model: Mapping[str, Any] | None) -> Iterator[Problem]:
    if config.conversion_cache and not _is_converted(context, model):
        yield from directory_problems(cache_directory(), _converted_bytes(context, model))


def _is_converted(context: CheckContext, model: Mapping[str, Any] | None) -> bool:
    """Return whether the copy of a local model is there already, so that nothing will be written."""
    if model is None:
        return False
    from rlcore_megatron.checkpoints.conversion import MARK, copy_directory

    return (copy_directory(context.model) / MARK).exists()


def _converted_bytes(context: CheckContext, model: Mapping[str, Any] | None) -> int | None:
    """The size of a local model in the recipe's dtype; None for one on the Hub."""
    if model is None:
        return None
    files = config_file(context).parent.glob("*.safetensors")
    stored = ITEM_BYTES.get(str(model.get("dtype") or model.get("torch_dtype")), ITEM_BYTES["bfloat16"])
    return sum(file.stat().st_size for file in files) * ITEM_BYTES[context.model.dtype] // stored


def _auto_problems(context: CheckContext, config: MegatronConfig, model: Mapping[str, Any] | None) -> Iterator[Problem]:
    """Refuse "auto" where no sizes fit. The driver of a cluster may have no GPU: the workers then check whether they fit."""
    if model is None or not any(getattr(config, name) == "auto" for name in AUTO_SIZES):
        return
    memories = device_memories() if context.device == "cuda" else None
    load = Workload(
        world_size=context.world_size,
        model=model,
        device=context.device,
        max_sequence_length=context.max_sequence_length,
        max_microbatch_tokens=context.max_microbatch_tokens,
        reference=_reference(context, model),
        memory_bytes=min(memories) if memories else None,
        dtype=context.model.dtype,
        lora=context.lora,
        optimizer=context.optimizer or OptimizerSpec(),
        trains=context.needs_policy,
    )
    try:
        choose(config, load)
    except ConfigError as error:
        yield from error.problems


def _reference(context: CheckContext, model: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The config.json of the frozen model that is held too; the policy's for one that cannot be read."""
    if not (context.needs_reference and context.needs_policy) or (context.lora is not None and context.reference is None):
        return None
    named = None if context.reference is None else model_config(evolve(context, model=context.reference))
    return named or model


def _transformer_problems(context: CheckContext, config: MegatronConfig, model: Mapping[str, Any] | None) -> Iterator[Problem]:
    """Report what Megatron's TransformerConfig itself refuses of the recipe's table, for this model and the one of
    [reference]."""
    if model is None or not config.transformer:
        return
    from rlcore_megatron.layouts.layout import ParallelLayout
    from rlcore_megatron.modules.model_config import transformer_config

    sizes = evolve(config, **{name: 1 for name in AUTO_SIZES if getattr(config, name) == "auto"})
    layout = ParallelLayout.of(sizes, 0, context.world_size, model, context.device, context.max_sequence_length)
    models = [(context.model, context.head, "this model")]
    if context.reference is not None and _reference(context, {}):
        models.append((context.reference, "tokens", f"{context.reference.path}, the reference"))
    for spec, head, name in models:
        try:
            transformer_config(load_config(spec, head), config, layout, context.model.dtype, context.device)
        except (AssertionError, ValueError, ImportError) as error:
            found = f"{', '.join(config.transformer)}, refused with: {str(error).strip() or type(error).__name__}"
            yield option_problem("transformer", found, f"values that Megatron's TransformerConfig takes for {name}")
