"""The losses that the server knows, with the inputs and constants that each takes. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from rlcore.spi import ADVANTAGES, GENERATION_LOGPROBS, LossSpec
from rlcore_tinker.errors import refuse

WEIGHTS_INPUT, LOGPROBS_INPUT, ADVANTAGES_INPUT = "weights", "logprobs", "advantages"
TARGETS_INPUT, RATIO_INPUT = "target_tokens", "sequence_ratio_mask"
CLIP_INPUTS = ("clip_low_threshold", "clip_high_threshold")
TOKEN_WEIGHTS = "token_weights"
"""float32 [T]: the factor of each token's loss."""
LOSS_SUM = "loss:sum"
"""The metric that holds the loss."""
COLUMNS = {WEIGHTS_INPUT: TOKEN_WEIGHTS, LOGPROBS_INPUT: GENERATION_LOGPROBS, ADVANTAGES_INPUT: ADVANTAGES}
"""The token column of an input where it has another name."""
NOT_SERVED = {
    "stable_reinforce": "its objective is not published, and it reads what the service records when it samples",
    "custom": "the server runs no uploaded losses; forward_backward_custom with a function of yours computes the loss with you",
}
"""Losses of the client that the server lacks, and why."""


@frozen(kw_only=True)
class Loss:
    """A loss that the server knows."""

    name: str
    required: tuple[str, ...]
    """Inputs that each datum has besides target_tokens."""
    optional: tuple[str, ...] = ()
    constants: Mapping[str, float] = field(factory=dict)
    """Keys of loss_fn_config with their defaults."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """All inputs besides target_tokens, each of which becomes a token column."""
        return (*self.required, *self.optional)

    @property
    def columns(self) -> tuple[str, ...]:
        """The token columns that the loss reads."""
        return tuple(COLUMNS.get(name, name) for name in self.inputs)

    def spec(self, config: Mapping[str, float]) -> LossSpec:
        """Return what the trainer computes, with these constants."""
        from rlcore_tinker import losses

        constants = losses.DroConstants(**config) if self.name == "dro" else losses.NoConstants()
        return LossSpec(path=f"rlcore_tinker.losses:{self.name}", config=constants, token_columns=self.columns)


_RL = (LOGPROBS_INPUT, ADVANTAGES_INPUT)
_CLIP = dict(zip(CLIP_INPUTS, (0.8, 1.2), strict=True))
LOSSES = {
    loss.name: loss
    for loss in (
        Loss(name="cross_entropy", required=(), optional=(WEIGHTS_INPUT,)),
        Loss(name="importance_sampling", required=_RL, optional=(WEIGHTS_INPUT,)),
        Loss(name="ppo", required=_RL, optional=(WEIGHTS_INPUT, *CLIP_INPUTS), constants=_CLIP),
        Loss(name="cispo", required=_RL, optional=(WEIGHTS_INPUT, *CLIP_INPUTS), constants=_CLIP),
        Loss(name="dro", required=_RL, optional=(WEIGHTS_INPUT,), constants={"beta": 0.05}),
        Loss(name="gspo", required=(*_RL, RATIO_INPUT), optional=(WEIGHTS_INPUT, *CLIP_INPUTS), constants=_CLIP),
    )
}


def find_loss(name: str) -> Loss:
    """Return the loss of a name. RequestError where the server lacks it."""
    if name not in LOSSES:
        reason = f" ({NOT_SERVED[name]})" if name in NOT_SERVED else ""
        refuse([f"loss_fn: found {name!r:.60}{reason}; expected one of {', '.join(LOSSES)}"])
    return LOSSES[name]


def read_constants(loss: Loss, found: Mapping[str, Any]) -> dict[str, float]:
    """Return the loss's constants: those of loss_fn_config, and defaults. RequestError for keys and values that are wrong."""
    problems = [
        f"loss_fn_config: found {key!r:.60}; expected {' or '.join(loss.constants) or 'no key'} with {loss.name}"
        for key in found
        if key not in loss.constants
    ]
    for key, value in found.items():
        if key in loss.constants and (not isinstance(value, float) or not 0 <= value < float("inf")):
            problems.append(f"loss_fn_config.{key}: found {value!r:.60}; expected a number of at least 0")
    constants = {**loss.constants, **{key: value for key, value in found.items() if key in loss.constants}}
    if not problems and set(CLIP_INPUTS) <= {*constants} and constants[CLIP_INPUTS[0]] > constants[CLIP_INPUTS[1]]:
        problems.append(f"loss_fn_config: found {constants}; expected {CLIP_INPUTS[0]} of at most {CLIP_INPUTS[1]}")
    refuse(problems)
    return constants
