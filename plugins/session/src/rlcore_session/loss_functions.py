"""The losses of sessions that run inside the trainer."""

from attrs import frozen

from rlcore.spi import LossInputs, LossOutput

WEIGHTS = "weights"
"""float32 [T]: the weight of each token in "cross_entropy"; without it each weighs 1."""
DERIVATIVES = "loss_derivatives"
"""float32 [T]: the derivative of a caller's loss by the log-probability of each token; 0.0 where loss_mask is False."""


@frozen
class NoOptions:
    """A loss that takes no options."""


def cross_entropy(inputs: LossInputs, config: NoOptions) -> LossOutput:
    """-Σ weight · log-probability over the loss tokens, divided by the global number of loss tokens; in nats."""
    import torch

    del config
    losses = -torch.where(inputs.loss_mask, inputs.logprobs, 0.0)
    if WEIGHTS in inputs.token_columns:
        losses = losses * inputs.token_columns[WEIGHTS]
    return LossOutput(loss=losses.sum() / max(inputs.counts.num_loss_tokens, 1))


def linear(inputs: LossInputs, config: NoOptions) -> LossOutput:
    """Σ derivative · log-probability over the loss tokens. Its gradient is that of the loss that the derivatives are of."""
    import torch

    del config
    weighted = inputs.token_columns[DERIVATIVES] * inputs.logprobs
    return LossOutput(loss=torch.where(inputs.loss_mask, weighted, 0.0).sum())
