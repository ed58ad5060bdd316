"""The loss of pairs of answers by their rewards, run inside every trainer."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlcore.spi import MARGINS, ContractError, LossInputs, LossOutput
from rlcore_reward_model.config import RewardConfig


def reward_loss(inputs: LossInputs, config: RewardConfig) -> LossOutput:
    """The mean of -log σ(r_chosen - r_rejected - m) + c (r_chosen + r_rejected)² over the step's pairs, global loss sequences /
    2, where r is the value at a sequence's last token, m the pair's margin, 0 where rows tell none (Llama 2, arXiv:2307.09288,
    equation 2), and c is `center_rewards_coefficient` (arXiv:2009.01325, section 3.4; arXiv:2312.09244). The
    two sequences of a pair are adjacent, the chosen answer first.

    Metrics, means over the pairs: `rewards/chosen` and `rewards/rejected`; `rewards/margins`, their difference;
    `rewards/accuracies`, the share where it is above 0. ContractError where sequences are not in pairs.
    """
    if len(inputs.offsets) % 2 == 0:
        raise ContractError(f"found {len(inputs.offsets) - 1} sequences in a microbatch; expected pairs (needs.whole_groups)")
    if inputs.values is None:
        raise ContractError('found no values; expected a trainer with the head "value" (needs.head)')
    num_pairs = max(inputs.counts.num_loss_sequences, 2) / 2
    pairs = inputs.values[inputs.offsets[1:] - 1].view(-1, 2)
    counted = inputs.loss_mask.long().cumsum(0)[inputs.offsets[1:] - 1]
    counted = counted.diff(prepend=counted.new_zeros(1))[0::2] > 0  # False for what fills an empty microbatch
    chosen, rejected = pairs.unbind(1)

    def mean(each: Tensor) -> Tensor:
        return torch.where(counted, each, 0.0).sum() / num_pairs

    margins = inputs.sequence_columns.get(MARGINS)
    loss = mean(-logsigmoid(chosen - rejected - (0.0 if margins is None else margins[0::2])))
    if config.center_rewards_coefficient:
        loss = loss + config.center_rewards_coefficient * mean((chosen + rejected) ** 2)
    with torch.no_grad():
        sums = {
            "rewards/chosen": mean(chosen),
            "rewards/rejected": mean(rejected),
            "rewards/margins": mean(chosen - rejected),
            "rewards/accuracies": mean((chosen > rejected).to(chosen.dtype)),
        }
    return LossOutput(loss=loss, sums=sums)
