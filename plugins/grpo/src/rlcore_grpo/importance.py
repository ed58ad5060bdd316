"""What a token weighs in GRPO's objective, and which tokens it leaves out."""

from collections.abc import Mapping

import torch
from attrs import frozen
from torch import Tensor

from rlcore.spi import ADVANTAGES, LossInputs
from rlcore_grpo.loss_config import LossConfig
from rlcore_torchkit.rl.correction import (
    bounded,
    importance_ratio,
    on_policy,
    sequence_importance_ratio,
    within_geometric_mean,
)
from rlcore_torchkit.rl.metrics import MaskedMean, sequence_maxima, sequence_mismatch
from rlcore_torchkit.rl.sequences import Sequences


@frozen(kw_only=True, eq=False)
class Importance:
    """Nothing here has a gradient."""

    weight: Tensor | None
    """float32 [T]: the bounded ratio of the trainer to the generator; None where each is 1."""
    kept: Tensor | None
    """bool [T]: whether a token is part of the objective; None where all are."""
    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]

    def applied_to(self, loss: Tensor, *, is_weighed: bool) -> Tensor:
        """[T]: the objective's `loss` [T] with weight and mask; a NaN stays one. `is_weighed`: the weight is in it already."""
        if self.weight is not None and not is_weighed:
            loss = loss * self.weight
        return loss if self.kept is None else loss * self.kept


def importance_of(
    inputs: LossInputs,
    config: LossConfig,
    *,
    current: Tensor,
    previous: Tensor,
    generation: Tensor,
    sequences: Sequences,
) -> Importance:
    """Weight and mask by log-probabilities float32 [T], 0 outside the mask: of policy, trainer before the step, and sampler."""
    mean = MaskedMean(inputs.loss_mask, inputs.counts)
    weight: Tensor | None = None
    sums: dict[str, Tensor] = {}
    maxima: dict[str, Tensor] = {}
    kept: dict[str, Tensor] = {}
    if config.previous_logprobs != "generation":
        if config.importance_correction != "none":
            ratio = _ratio(config, previous, generation, sequences)
            low, high = config.importance_minimum, config.importance_maximum
            weight = bounded(ratio, config.importance_bound, minimum=low, maximum=high)
            outside = (ratio < low) | (ratio > high)
            sums["importance_truncated" if config.importance_bound == "truncate" else "importance_masked"] = mean(outside)
            sums["importance_weight"] = mean(weight)
            maxima["importance_weight_max"] = torch.where(inputs.loss_mask, ratio, 0.0).max()
        if config.masks_by_geometric_mean:
            kept["geometric_masked"] = within_geometric_mean(
                previous, generation, sequences, minimum=config.geometric_minimum, maximum=config.geometric_maximum
            )
        sums.update(sequence_mismatch(previous, generation, sequences, inputs.counts))
        maxima.update(sequence_maxima(previous, generation, sequences))
    if config.off_policy_maximum is not None:
        kept["off_policy_masked"] = on_policy(
            current, generation, inputs.token_columns[ADVANTAGES], sequences, maximum=config.off_policy_maximum
        )
    if config.entropy_minimum is not None:
        assert inputs.entropy is not None, "refused by check"
        kept["low_entropy_masked"] = inputs.entropy.detach() >= config.entropy_minimum
    sums.update({name: mean(~tokens) for name, tokens in kept.items()})
    return Importance(weight=weight, kept=torch.stack([*kept.values()]).all(0) if kept else None, sums=sums, maxima=maxima)


def _ratio(config: LossConfig, previous: Tensor, generation: Tensor, sequences: Sequences) -> Tensor:
    """float32 [T]: how much likelier the trainer found a token, or its sequence, than the generator."""
    if config.importance_correction == "sequence":
        return sequence_importance_ratio(previous, generation, sequences)
    return importance_ratio(previous, generation)
