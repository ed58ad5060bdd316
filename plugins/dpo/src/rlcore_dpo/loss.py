"""The loss of pairs of answers, run inside every trainer."""

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlcore.spi import REFERENCE_LOGPROBS, ContractError, LossInputs, LossOutput
from rlcore_dpo.config import DpoConfig

MAX_LOG = -1e-6
"""Log-probability of a token beyond which the odds of an answer rise no further: at 0 they are infinite."""


def dpo_loss(inputs: LossInputs, config: DpoConfig) -> LossOutput:
    """The mean of `pair_losses` over the optimizer step's pairs, which are P = global loss sequences / 2 and adjacent
    sequences each, the chosen answer first. With `sft_coefficient` c, c times the mean over them of the chosen answer's
    -Σ logprobs / tokens beside it; that mean is the metric `nll_loss`.

    Metrics, means over the pairs: `rewards/chosen` and `rewards/rejected`, β times the scores that are compared;
    `rewards/margins`, their difference; `rewards/accuracies`, the share where it is above 0; `logps/chosen` and
    `logps/rejected`, the answers' log-probabilities, summed over their tokens. ContractError where sequences are not in pairs.
    """
    if len(inputs.offsets) % 2 == 0:
        raise ContractError(f"found {len(inputs.offsets) - 1} sequences in a microbatch; expected pairs (needs.whole_groups)")
    num_pairs = max(inputs.counts.num_loss_sequences, 2) / 2
    logps, num_tokens = per_sequence(inputs.logprobs, inputs), per_sequence(torch.ones_like(inputs.logprobs), inputs)
    scores = logps
    if config.reference == "initial":
        # Token by token first: a difference of two sums over thousands of tokens would lose what is learned.
        scores = per_sequence(inputs.logprobs - inputs.token_columns[REFERENCE_LOGPROBS], inputs)
    pairs = Pairs.of(scores / num_tokens.clamp(min=1) if config.length_normalised else scores)
    counted = Pairs.of(num_tokens).chosen > 0  # False for what fills an empty microbatch

    def mean(values: Tensor) -> Tensor:
        return torch.where(counted, values, 0.0).sum() / num_pairs

    loss = mean(pair_losses(pairs, config))
    with torch.no_grad():
        chosen, rejected, answers = config.beta * pairs.chosen, config.beta * pairs.rejected, Pairs.of(logps)
        sums = {
            "rewards/chosen": mean(chosen),
            "rewards/rejected": mean(rejected),
            "rewards/margins": mean(chosen - rejected),
            "rewards/accuracies": mean((chosen > rejected).to(chosen.dtype)),
            "logps/chosen": mean(answers.chosen),
            "logps/rejected": mean(answers.rejected),
        }
    if config.sft_coefficient:
        likelihood = mean(Pairs.of(-logps / num_tokens.clamp(min=1)).chosen)
        loss = loss + config.sft_coefficient * likelihood
        sums["nll_loss"] = likelihood.detach()
    return LossOutput(loss=loss, sums=sums)


@frozen(eq=False)
class Pairs:
    """A value of both answers of each pair."""

    chosen: Tensor
    """[P]"""
    rejected: Tensor
    """[P]"""

    @classmethod
    def of(cls, values: Tensor) -> "Pairs":
        """From one of each sequence, [2P]."""
        return cls(*values.view(-1, 2).unbind(1))


def pair_losses(scores: Pairs, config: DpoConfig) -> Tensor:
    """[P], from the scores s of chosen and rejected answers; h = s_chosen - s_rejected, ε is `label_smoothing`:

    - "sigmoid": -(1 - ε) log σ(βh - margin) - ε log σ(-βh) (arXiv:2305.18290, equation 7; with a margin arXiv:2405.14734,
      equation 6; with ε Mitchell's conservative DPO, which arXiv:2403.00409 compares with);
    - "robust": (-(1 - ε) log σ(βh) + ε log σ(-βh)) / (1 - 2ε) (the unbiased loss of arXiv:2403.00409, section 3);
    - "hinge": max(0, 1 - βh) ("hinge-norm" of arXiv:2309.06657);
    - "ipo": (h - 1 / (2β))² (arXiv:2310.12036, equation 17);
    - "apo_zero": 1 - σ(β s_chosen) + σ(β s_rejected) (arXiv:2408.06266, equation 7);
    - "apo_down": σ(β s_chosen) + 1 - σ(βh) (arXiv:2408.06266, equation 8);
    - "odds_ratio": -β log σ(o_chosen - o_rejected), o = s - log(1 - e^s) (arXiv:2403.07691, equations 4 and 7).
    """
    beta, smoothing = config.beta, config.label_smoothing
    lead = scores.chosen - scores.rejected
    match config.loss:
        case "sigmoid":
            return -(1 - smoothing) * logsigmoid(beta * lead - config.margin) - smoothing * logsigmoid(-beta * lead)
        case "robust":
            swapped = smoothing * logsigmoid(-beta * lead)
            return (swapped - (1 - smoothing) * logsigmoid(beta * lead)) / (1 - 2 * smoothing)
        case "hinge":
            return torch.relu(1 - beta * lead)
        case "ipo":
            return (lead - 1 / (2 * beta)) ** 2
        case "apo_zero":
            return 1 - torch.sigmoid(beta * scores.chosen) + torch.sigmoid(beta * scores.rejected)
        case "apo_down":
            return torch.sigmoid(beta * scores.chosen) + 1 - torch.sigmoid(beta * lead)
        case "odds_ratio":
            return -beta * logsigmoid(_log_odds(scores.chosen) - _log_odds(scores.rejected))


def _log_odds(logs: Tensor) -> Tensor:
    """log(p / (1 - p)) of logs = log p, which are at most MAX_LOG."""
    logs = logs.clamp(max=MAX_LOG)
    return logs - torch.log(-torch.expm1(logs))


def per_sequence(values: Tensor, inputs: LossInputs) -> Tensor:
    """[N]: sums of `values` [T] over each sequence's loss tokens."""
    num_sequences = len(inputs.offsets) - 1
    owner = torch.arange(num_sequences, device=values.device)
    owner = owner.repeat_interleave(inputs.offsets.diff(), output_size=len(values))
    return values.new_zeros(num_sequences).index_add(0, owner, torch.where(inputs.loss_mask, values, 0.0))
