"""The probe losses for trainers in torch."""

import torch

from rlcore.spi import ADVANTAGES, LossInputs, LossOutput
from rlcore_conformance.references.probe import (
    LARGEST_SURPRISE,
    LARGEST_VALUE,
    MEAN_ENTROPY,
    MEAN_LOGPROB,
    MEAN_PREVIOUS_LOGPROB,
    MEAN_VALUE,
    PREVIOUS_COEFFICIENT,
    PROBE_WEIGHT,
    SEQUENCE_SHARE,
    SURPRISE_BELOW_100,
    TOKEN_SHARE,
    ProbeConfig,
    ValueProbeConfig,
)


def probe_loss(inputs: LossInputs, config: ProbeConfig) -> LossOutput:
    """The formula of `probe`, on one microbatch."""
    logprobs, counts = inputs.logprobs, inputs.counts
    mask = inputs.loss_mask.to(logprobs.dtype)
    num_sequences = len(inputs.offsets) - 1
    owner = torch.repeat_interleave(torch.arange(num_sequences, device=mask.device), inputs.offsets.diff())
    per_sequence = mask.new_zeros(num_sequences).index_add(0, owner, mask)
    totals = logprobs.new_zeros(num_sequences).index_add(0, owner, mask * logprobs)
    means = totals / per_sequence.clamp(min=1)
    loss = -(mask * inputs.token_columns[ADVANTAGES] * logprobs).sum() / counts.num_loss_tokens
    loss = loss + (inputs.sequence_columns[PROBE_WEIGHT] * means).sum() / counts.num_loss_sequences
    if config.neighbours:
        loss = loss + (totals[::2].sum() - totals[1::2].sum()) / counts.num_loss_sequences
    sums = {
        MEAN_LOGPROB: (mask * logprobs).sum().detach() / counts.num_loss_tokens,
        TOKEN_SHARE: mask.sum() / counts.num_loss_tokens,
        SEQUENCE_SHARE: (per_sequence > 0).sum() / counts.num_loss_sequences,
    }
    if inputs.entropy is not None:
        mean_entropy = (mask * inputs.entropy).sum() / counts.num_loss_tokens
        loss = loss - config.entropy_coefficient * mean_entropy
        sums[MEAN_ENTROPY] = mean_entropy.detach()
    if inputs.previous_logprobs is not None:
        previous = mask * inputs.previous_logprobs
        loss = loss + PREVIOUS_COEFFICIENT * (previous * logprobs).sum() / counts.num_loss_tokens
        sums[MEAN_PREVIOUS_LOGPROB] = previous.sum().detach() / counts.num_loss_tokens
    if config.poison_gradient:
        # Zero, but the derivative of the root is infinite there.
        loss = loss + torch.sqrt(logprobs.sum() - logprobs.sum().detach())
    largest = (-mask * logprobs).max().detach()
    return LossOutput(loss=loss, sums=sums, maxima={LARGEST_SURPRISE: largest, SURPRISE_BELOW_100: largest - 100.0})


def value_probe_loss(inputs: LossInputs, config: ValueProbeConfig) -> LossOutput:  # noqa: ARG001
    """The formula of `ValueProbeConfig`, on one microbatch."""
    values, counts = inputs.values, inputs.counts
    assert values is not None
    assert not inputs.logprobs.requires_grad
    mask = inputs.loss_mask.to(values.dtype)
    errors = (values - inputs.token_columns[ADVANTAGES]) ** 2 / 2 + inputs.logprobs
    loss = (mask * errors).sum() / counts.num_loss_tokens
    counted = torch.stack([mask[start:end].sum() > 0 for start, end in inputs.offsets.unfold(0, 2, 1).tolist()])
    weights = inputs.sequence_columns[PROBE_WEIGHT] * counted
    loss = loss + (weights * values[inputs.offsets[1:] - 1]).sum() / counts.num_loss_sequences
    found = values.detach()
    return LossOutput(
        loss=loss,
        sums={MEAN_VALUE: (mask * found).sum() / counts.num_loss_tokens, TOKEN_SHARE: mask.sum() / counts.num_loss_tokens},
        maxima={LARGEST_VALUE: torch.where(inputs.loss_mask, found, -torch.inf).max()},
    )
