"""The loss functions of the protocol: sums over tokens, divided by nothing (tinker-docs.thinkingmachines.ai/tinker/losses).

The tokens of a sum are those of `loss_mask`. With p the model's and q the sampler's log-probability, A the advantage and w the
weight of a token, r = exp(p - q), and sg() without a gradient:

    cross_entropy         -Σ w p
    importance_sampling   -Σ w r A
    ppo                   -Σ w min(r A, clip(r) A)             (arXiv:1707.06347)
    cispo                 -Σ w sg(clip(r)) p A                 (arXiv:2506.13585)
    dro                   -Σ w (p A - β/2 (p - q)²)            (arXiv:2405.19107)
    gspo                  -Σ w min(s A, clip(s) A), s = sg(exp(mean over M of p - q)) r / sg(r)   (arXiv:2507.18071, GSPO-token)
"""

import torch
from attrs import frozen
from torch import Tensor

from rlcore.spi import ADVANTAGES, GENERATION_LOGPROBS, LossInputs, LossOutput
from rlcore_tinker.loss_table import CLIP_INPUTS, LOSS_SUM, RATIO_INPUT, TOKEN_WEIGHTS


@frozen(kw_only=True)
class NoConstants:
    """The constants of a loss that has none."""


@frozen(kw_only=True)
class DroConstants:
    """The constants of `dro`."""

    beta: float = 0.05
    """The factor of the quadratic penalty."""


def cross_entropy(inputs: LossInputs, config: NoConstants) -> LossOutput:  # noqa: ARG001
    """Sum the negative log-probabilities, each by its weight."""
    return _summed(inputs, inputs.logprobs)


def importance_sampling(inputs: LossInputs, config: NoConstants) -> LossOutput:  # noqa: ARG001
    """Sum the advantages by the importance ratio."""
    return _summed(inputs, torch.exp(_log_ratios(inputs)) * _advantages(inputs))


def ppo(inputs: LossInputs, config: NoConstants) -> LossOutput:  # noqa: ARG001
    """Sum PPO's clipped objective."""
    return _summed(inputs, _clipped_objective(inputs, _log_ratios(inputs)))


def cispo(inputs: LossInputs, config: NoConstants) -> LossOutput:  # noqa: ARG001
    """Sum the log-probabilities by advantage and clipped ratio, which has no gradient."""
    return _summed(inputs, _clip(inputs, torch.exp(_log_ratios(inputs).detach())) * inputs.logprobs * _advantages(inputs))


def dro(inputs: LossInputs, config: DroConstants) -> LossOutput:
    """Sum the log-probabilities by advantage, less a quadratic penalty on the log-ratio."""
    penalty = 0.5 * config.beta * (inputs.logprobs - inputs.token_columns[GENERATION_LOGPROBS]) ** 2
    return _summed(inputs, inputs.logprobs * _advantages(inputs) - penalty)


def gspo(inputs: LossInputs, config: NoConstants) -> LossOutput:  # noqa: ARG001
    """Sum PPO's clipped objective with the ratio of each sequence, whose gradient is that of each token."""
    logprobs = inputs.logprobs.detach()
    in_ratio = (inputs.token_columns[RATIO_INPUT] != 0).to(logprobs.dtype)
    log_ratios = torch.where(in_ratio != 0, logprobs - inputs.token_columns[GENERATION_LOGPROBS], 0.0)
    lengths = inputs.offsets.diff()
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    sums, counts = (logprobs.new_zeros(len(lengths)).index_add_(0, rows, column) for column in (log_ratios, in_ratio))
    log_ratios = (sums / counts.clamp(min=1))[rows] + inputs.logprobs - logprobs
    return _summed(inputs, _clipped_objective(inputs, torch.where(_has_term(inputs), log_ratios, 0.0)))


def _log_ratios(inputs: LossInputs) -> Tensor:
    """p - q of each token, [T]; 0.0 where a token has no term."""
    difference = inputs.logprobs - inputs.token_columns[GENERATION_LOGPROBS]
    return torch.where(_has_term(inputs), difference, 0.0)


def _has_term(inputs: LossInputs) -> Tensor:
    """bool [T]: the tokens whose term is not 0 whatever their ratio. 0 times an infinite ratio would be NaN."""
    return inputs.loss_mask & (_advantages(inputs) != 0) & (inputs.token_columns[TOKEN_WEIGHTS] != 0)


def _advantages(inputs: LossInputs) -> Tensor:
    return inputs.token_columns[ADVANTAGES]


def _clip(inputs: LossInputs, ratios: Tensor) -> Tensor:
    return torch.clamp(ratios, *(inputs.token_columns[name] for name in CLIP_INPUTS))


def _clipped_objective(inputs: LossInputs, log_ratios: Tensor) -> Tensor:
    advantages, ratios = _advantages(inputs), torch.exp(log_ratios.detach())
    clipped = _clip(inputs, ratios) * advantages
    is_plain = ratios * advantages <= clipped
    # A ratio that the clip replaces may be infinite: torch.minimum's gradient of it, 0 times infinity, would be NaN.
    plain = torch.exp(torch.where(is_plain, log_ratios, 0.0)) * advantages
    return torch.where(is_plain, plain, clipped)


def _summed(inputs: LossInputs, objective: Tensor) -> LossOutput:
    """The loss of the objective [T]: its negative sum over the loss's tokens, by their weights."""
    terms = torch.where(inputs.loss_mask, objective * inputs.token_columns[TOKEN_WEIGHTS], 0.0)
    loss = -terms.sum()
    return LossOutput(loss=loss, sums={LOSS_SUM: loss.detach()})
