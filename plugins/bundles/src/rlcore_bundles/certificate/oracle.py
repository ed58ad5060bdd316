"""The loss of a bundle's updates in float64, from the log-probabilities that the updates recorded."""

import importlib
import typing
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from rlcore.registry.discovery import discover
from rlcore.schema import describe
from rlcore.schema.structure import structure
from rlcore.spi import PREVIOUS_LOGPROBS, GlobalCounts, LossInputs
from rlcore_bundles.bundle import Bundle, Update

TOLERANCE = 1e-5
"""Greatest difference of a loss in float32 from the one in float64, in units of the greatest advantage, or of 1."""


def loss_in_float64(bundle: Bundle, number: int) -> float | str:
    """The loss of update `number` in float64, or the reason why the bundle cannot give it."""
    import torch

    update = bundle.updates[number]
    if update.logprobs is None:
        return "its trainer returned no log-probabilities"
    if update.loss_config.get("entropy_coefficient") or update.loss_config.get("entropy_minimum") is not None:
        return "the loss reads entropies, which no bundle holds"
    function = _loss_of(update)
    if isinstance(function, str):
        return function
    config = _config_of(function, update.loss_config)
    if isinstance(config, str):
        return config
    columns: dict[str, Any] = {**bundle.trained.token_columns, **update.columns, "logprobs": update.logprobs}
    batch = bundle.trained
    part = type(batch)(
        tokens=batch.tokens,
        offsets=batch.offsets,
        loss_mask=batch.loss_mask,
        token_columns=columns,
        sequence_columns=batch.sequence_columns,
    ).select(update.sequences)
    wide = {name: _wide(torch.as_tensor(np.array(column))) for name, column in part.token_columns.items()}
    logprobs = wide.pop("logprobs").requires_grad_()
    previous = wide.get(PREVIOUS_LOGPROBS, logprobs.detach() if number == 0 else None)
    if previous is None and update.loss_config.get("previous_logprobs") == "trainer":
        return "the loss reads the log-probabilities at the beginning of the step, which this update did not record"
    inputs = LossInputs(
        logprobs=logprobs,
        entropy=None,
        loss_mask=torch.as_tensor(np.array(part.loss_mask)),
        offsets=torch.as_tensor(np.array(part.offsets)),
        token_columns=wide,
        sequence_columns={name: _wide(torch.as_tensor(np.array(one))) for name, one in part.sequence_columns.items()},
        counts=GlobalCounts(num_loss_tokens=update.num_loss_tokens, num_loss_sequences=update.num_loss_sequences),
        previous_logprobs=previous,
    )
    return float(function(inputs, config).loss.detach())


def tolerance(bundle: Bundle) -> float:
    """The greatest difference that rounding explains."""
    advantages = bundle.trained.token_columns.get("advantages")
    return TOLERANCE * max(1.0, 0.0 if advantages is None else float(np.abs(advantages).max(initial=0.0)))


def _wide(tensor: Any) -> Any:
    return tensor.double() if tensor.is_floating_point() else tensor


def _loss_of(update: Update) -> Any:
    """The loss function, of an installed algorithm's package alone: a bundle may name any module."""
    module, _, name = update.loss.partition(":")
    providers = [entry.provider for entry in discover().of("algorithm")]
    packages = {"rlcore_torchkit", *(str(one.backend).partition(".")[0] for one in providers if one is not None)}
    if module.partition(".")[0] not in packages:
        return f"its loss {update.loss} is of no installed algorithm"
    function = getattr(importlib.import_module(module), name, None)
    return function if callable(function) else f"its loss {update.loss} is not there"


def _config_of(function: Any, values: Mapping[str, Any]) -> Any:
    """The constants of a loss as its own class, or what is wrong with them."""
    hints = typing.get_type_hints(function)
    cls = hints.get("config")
    if cls is None:
        return f"{function.__qualname__} names no class of its constants"
    known = describe.fields(cls)  # an algorithm may add constants of its own, which the loss does not read
    absent = [name for name in known if values.get(name, "") is None]  # the converter has no word for None
    given = {name: value for name, value in values.items() if name in known and name not in absent}
    made, problems = structure(given, cls, "loss_config")
    return f"{problems[0].path}: found {problems[0].found}" if problems else attrs.evolve(made, **dict.fromkeys(absent))
