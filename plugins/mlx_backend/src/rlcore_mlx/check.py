"""Checks of a model, for trainer and generator, before anything is allocated; imports no MLX."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlcore.spi import CheckContext, Problem
from rlcore_mlx.rotary import ROPE_TYPES, rope_of
from rlcore_torchkit.huggingface.model_check import model_config, reference_problems, trained_model_problems


def check(context: CheckContext, config: object) -> Sequence[Problem]:  # noqa: ARG001 - the form
    """Problems of a local model, and of the reference; a model on the Hub is checked once loaded."""
    layers = layer_problems(model_config(context), context.model.path)
    others = reference_problems(context, lambda model: list(layer_problems(model, "model.path")))
    return [*trained_model_problems(context), *layers, *others]


def layer_problems(model: Mapping[str, Any] | None, path: str) -> Iterator[Problem]:
    """Layers that are not computed here; `model` is the content of a config.json, None where there is none to judge."""
    if model is None:
        return
    if model.get("num_experts"):
        yield Problem(path=path, found=f"a model of {model['num_experts']} experts", expected="a dense model")
    if (kind := rope_of(model).get("rope_type", "default")) not in ROPE_TYPES:
        yield Problem(path=path, found=f"rope_type {kind}", expected=f"one of {', '.join(ROPE_TYPES)}")
    if (activation := model.get("hidden_act", "silu")) != "silu":
        yield Problem(path=path, found=f"hidden_act {activation}", expected="silu")
    for key in ("attention_bias", "mlp_bias"):
        if model.get(key):
            yield Problem(path=path, found=f"{key} = true", expected="false")
