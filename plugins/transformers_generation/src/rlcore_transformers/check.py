"""Checks of the generator's model before anything is allocated. Importing this file imports neither torch nor transformers."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.model_files import read_object
from rlcore.schema.file_limits import expanded
from rlcore.spi import CheckContext, Problem
from rlcore_torchkit.architectures.decoders import described_family, is_image_model, length_problems
from rlcore_torchkit.huggingface import class_trial
from rlcore_torchkit.huggingface.model_check import (
    config_file,
    model_config,
    position_problems,
    routing_problems,
    too_few_positions,
    undescribed_problems,
)
from rlcore_torchkit.huggingface.models import any_decoder_problems
from rlcore_transformers.config import TransformersConfig


def check(context: CheckContext, config: TransformersConfig) -> Sequence[Problem]:  # noqa: ARG001 - the form
    """Return the problems in a local model's config.json; a model on the Hub is checked once loaded."""
    problems = list(any_decoder_problems(context.model))
    content = read_object(config_file(context))
    if problems or isinstance(content, Problem):
        return problems
    path, longest = context.model.path, context.max_sequence_length
    if described_family(content, path) is None:
        problems = [*class_problems(content, path, longest), *undescribed_problems(content, context)]
    elif (model := model_config(context)) is not None:
        problems = model_problems(model, path, longest, routed_experts=context.replays_routing)
    return problems or class_trial.class_problems(context.model, context.head)


def model_problems(
    model: Mapping[str, Any], path: str, max_sequence_length: int, *, routed_experts: bool = False
) -> list[Problem]:
    """Refuse a described model that does not fit the run: too few positions, positions that vary, no experts to report."""
    problems = list(routing_problems(model, path)) if routed_experts else []
    longest = model.get("max_position_embeddings")
    if longest is not None and max_sequence_length > longest:
        found = f"max_position_embeddings = {longest}"
        problems.append(too_few_positions(expanded(path) / "config.json", found, max_sequence_length))
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "longrope":
        found = "rope_type = 'longrope', whose angles change with the length of the sequence"
        expected, remedy = "one of default, linear, dynamic, yarn, llama3", "Use another generator for this model."
        problems.append(Problem(path=path, found=found, expected=expected, remedy=remedy))
    return problems


def class_problems(model: Mapping[str, Any], path: str, max_sequence_length: int) -> list[Problem]:
    """Refuse a model that no family describes and that does not fit: images, lengths."""
    remedy = "Use another generator for this model."
    if is_image_model(model):
        found = f"model_type {model.get('model_type')}, which reads images"
        return [Problem(path=path, found=found, expected="a model of text", remedy=remedy)]
    problems = position_problems(model, expanded(path) / "config.json", max_sequence_length)
    return [*problems, *length_problems(model, path, max_sequence_length)]
