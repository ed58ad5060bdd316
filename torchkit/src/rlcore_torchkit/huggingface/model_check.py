"""Checks of a recipe's model, for any backend, before anything is allocated."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve

from rlcore.model_files import CONFIG_FILE, read_object
from rlcore.schema.file_limits import expanded
from rlcore.spi.context import CheckContext, ModelSpec
from rlcore.spi.errors import ModelError, Note, Problem
from rlcore_model_files.directory import is_hub_name
from rlcore_model_files.images import PROCESSOR_FILES, load_image_processor
from rlcore_torchkit.architectures.decoders import is_image_model
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.architectures.registry import NO_FAMILIES, Families, find_architecture
from rlcore_torchkit.huggingface.class_trial import class_problems
from rlcore_torchkit.huggingface.models import any_decoder_problems, architecture_problems

FLOAT8_WIDTH = 4096
"""The hidden size from which float8 is worth its conversions."""


def trained_model_problems(
    context: CheckContext, *, any_decoder: bool = False, families: Families = NO_FAMILIES
) -> Iterator[Problem]:
    """An unknown architecture, quantised weights, a dtype that needs a loss scale, too few positions. `any_decoder` says
    whether the trainer takes models that no family describes, `families` which it describes itself."""
    if context.model.dtype == "float16":
        remedy = "Set model.dtype to bfloat16: gradients in float16 would need a loss scale"
        yield Problem(path="model.dtype", found="float16", expected="float32 or bfloat16", remedy=remedy)
    if any_decoder:
        problems = any_decoder_problems(context.model, context.head)
    else:
        problems = architecture_problems(context.model.path, context.head, families)
    yield from problems
    yield from _fetched_processor_problems(context.model)
    config = read_object(config_file(context)) if any_decoder else model_config(context, families)
    if problems or config is None or isinstance(config, Problem):
        return
    yield from position_problems(config, config_file(context), context.max_sequence_length)
    yield from class_problems(context.model, context.head)
    yield from _processor_problems(context.model, config)


def _processor_problems(spec: ModelSpec, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Refuse a local model of images, with this config.json, without an image processor that loads. Code that comes with a
    model is not run."""
    if not is_image_model(config) or spec.trust_remote_code or not expanded(spec.path).is_dir():
        return
    try:
        load_image_processor(spec.path, spec.revision, trust_remote_code=False)
    except ModelError as error:
        yield from error.problems


def _fetched_processor_problems(spec: ModelSpec) -> Iterator[Problem]:
    """Refuse a model of images on the Hub without an image processor, by what was fetched before: its config.json, and the
    processor's files or the Hub's answer that there are none. Nothing is fetched."""
    if expanded(spec.path).exists() or not is_hub_name(spec.path):
        return
    from huggingface_hub import _CACHED_NO_EXIST, constants, try_to_load_from_cache

    names = (CONFIG_FILE, *PROCESSOR_FILES)
    config, *processors = (try_to_load_from_cache(spec.path, name, revision=spec.revision) for name in names)
    is_known = constants.HF_HUB_OFFLINE or all(one is _CACHED_NO_EXIST for one in processors)
    if not isinstance(config, str) or not (is_known or any(isinstance(one, str) for one in processors)):
        return
    content = read_object(Path(config))
    if not isinstance(content, Problem):
        problems = _processor_problems(evolve(spec, path=str(Path(config).parent)), content)
        yield from (evolve(problem, path=spec.path) for problem in problems)


def reference_problems(
    context: CheckContext,
    layout_problems: Callable[[Mapping[str, Any] | None], Iterable[Problem]],
    *,
    any_decoder: bool = False,
    families: Families = NO_FAMILIES,
) -> Iterator[Problem]:
    """Check the model in [reference], which shares the policy's layout; `layout_problems` checks a layout for a config.json."""
    if context.reference is None:
        return
    other = evolve(context, model=context.reference, reference=None)
    yield from trained_model_problems(other, any_decoder=any_decoder, families=families)
    mine = set(layout_problems(model_config(context, families)))
    for problem in layout_problems(model_config(other, families)):
        if problem not in mine:
            yield evolve(problem, found=f"{problem.found} (of {context.reference.path}, the reference)")


def position_problems(config: Mapping[str, Any], file: Path, max_sequence_length: int) -> Iterator[Problem]:
    """Sequences beyond the positions of a model, by the content of its config.json, which is `file`."""
    key = "n_positions" if "n_positions" in config else "max_position_embeddings"  # as GPT-2 and its kin call it
    text = config.get("text_config")
    limit = (text if text and isinstance(text, Mapping) else config).get(key)
    if isinstance(limit, int) and limit < max_sequence_length:
        yield too_few_positions(file, f"{key} = {limit}", max_sequence_length)


def undescribed_problems(config: Mapping[str, Any], context: CheckContext) -> Iterator[Problem]:
    """Refuse options that no generator has for a model that no family describes, by the content of its config.json."""
    if context.generator_lora is not None:
        found = f"unmerged adapters of a model of model_type {config.get('model_type')}"
        remedy = "No description of its family says which of the generator's layers they are for"
        yield Problem(path="refit.adapters", found=found, expected='"merged"', remedy=remedy)
    if context.replays_routing:
        found = f"true, for model_type {config.get('model_type')}"
        remedy = "No description of its family says which of its layers have experts"
        yield Problem(path="rollout.replay_routing", found=found, expected="false", remedy=remedy)


def too_few_positions(file: Path, found: str, max_sequence_length: int) -> Problem:
    """A model for shorter texts than the recipe's, in the same words from generators and trainers: a run says it once."""
    return Problem(
        path=str(file),
        found=found,
        expected=f"at least {max_sequence_length}, the longest sequence of the recipe",
        remedy="Lower rollout.max_prompt_tokens or rollout.max_response_tokens, or --max-length of `rlcore serve`, or use "
        "another model",
    )


def float8_notes(key: str, dims: ModelDims) -> Iterator[Note]:
    """Float8 for a model so narrow that its products are done before the conversions around them have paid; `key` of a recipe
    asks for it."""
    if dims.hidden_size < FLOAT8_WIDTH:
        text = (
            f"float8 does not pay below a hidden size of about {FLOAT8_WIDTH}, and this model's is {dims.hidden_size}. "
            "On an H100 a step of 1.5B at 1536 took 0.92 s with it and 0.71 s in bfloat16"
        )
        yield Note(path=key, text=text)


def routing_problems(model: Mapping[str, Any] | None, path: str) -> Iterator[Problem]:
    """Routing that is to be replayed with a model that routes nothing, for generators and trainers alike; `model` is what its
    config.json says, or None."""
    if model is not None and not model.get("num_experts"):
        yield Problem(
            path="rollout.replay_routing",
            found=f"true, with the model {path}, which has no experts",
            expected="a mixture-of-experts model, or false",
        )


def config_file(context: CheckContext) -> Path:
    """The path of a local model's config.json; for a model on the Hub, a path that does not exist."""
    return expanded(context.model.path) / "config.json"


def model_config(context: CheckContext, families: Families = NO_FAMILIES) -> dict[str, Any] | None:
    """Return config.json under the keys that most families use; None where it cannot be read, which the core reports, or where
    its family is unknown or its values malformed, which `architecture_problems` reports."""
    file = config_file(context)
    content = read_object(file)
    family = content if isinstance(content, Problem) else find_architecture(content, str(file), families)
    if isinstance(content, Problem) or isinstance(family, Problem) or family.malformed_values(content, str(file)):
        return None
    return family.standard(content)
