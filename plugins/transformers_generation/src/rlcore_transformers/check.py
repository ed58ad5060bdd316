"""What the generator cannot do, found before anything is allocated; imports neither torch nor transformers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.spi import CheckContext, Problem
from rlcore_torchkit.model_check import model_config, routing_problems, too_few_positions
from rlcore_torchkit.models import architecture_problems
from rlcore_transformers.config import TransformersConfig


def check(context: CheckContext, config: TransformersConfig) -> Sequence[Problem]:  # noqa: ARG001 - the form
    """Return the problems in a local model's config.json; a model on the Hub is checked once loaded."""
    problems = list(architecture_problems(context.model.path))
    model = model_config(context)
    if not problems and model is not None:
        problems += model_problems(
            model, context.model.path, context.max_sequence_length, routed_experts=context.replays_routing
        )
    return problems


def model_problems(
    model: Mapping[str, Any], path: str, max_sequence_length: int, *, routed_experts: bool = False
) -> list[Problem]:
    """What in a model's config does not fit the run: sequences beyond its positions, position embeddings that vary, no experts
    where their use is to be reported."""
    problems = list(routing_problems(model, path)) if routed_experts else []
    longest = model.get("max_position_embeddings")
    if longest is not None and max_sequence_length > longest:
        found = f"max_position_embeddings = {longest}"
        problems.append(too_few_positions(Path(path).expanduser() / "config.json", found, max_sequence_length))
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "longrope":
        found = "rope_type = 'longrope', whose angles change with the length of the sequence"
        expected, remedy = "one of default, linear, dynamic, yarn, llama3", "Use another generator for this model."
        problems.append(Problem(path=path, found=found, expected=expected, remedy=remedy))
    return problems
