"""The probe losses for the fake trainer: the value and its derivatives, written out."""

from typing import Any

import numpy as np

from rlcore.spi import ADVANTAGES, LossInputs, LossOutput
from rlcore.testing.fakes.algorithm import FakeLoss
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
    """The formula of `probe`, on one microbatch of numpy arrays."""
    arrays: Any = inputs
    logprobs, counts, offsets = arrays.logprobs, inputs.counts, arrays.offsets
    mask = arrays.loss_mask.astype(np.float64)
    per_sequence = np.add.reduceat(mask, offsets[:-1])
    shares = mask / np.maximum(np.repeat(per_sequence, np.diff(offsets)), 1.0) / counts.num_loss_sequences
    token_weights = mask / counts.num_loss_tokens
    grads = np.repeat(arrays.sequence_columns[PROBE_WEIGHT], np.diff(offsets)) * shares
    grads = grads - token_weights * arrays.token_columns[ADVANTAGES]
    previous = arrays.previous_logprobs
    if previous is not None:
        grads = grads + PREVIOUS_COEFFICIENT * token_weights * previous
    if config.neighbours:
        signs = np.resize([1.0, -1.0], len(per_sequence))
        grads = grads + np.repeat(signs, np.diff(offsets)) * mask / counts.num_loss_sequences
    value = float((grads * logprobs).sum())
    sums = {
        MEAN_LOGPROB: float((token_weights * logprobs).sum()),
        TOKEN_SHARE: float(token_weights.sum()),
        SEQUENCE_SHARE: float(np.count_nonzero(per_sequence) / counts.num_loss_sequences),
    }
    if previous is not None:
        sums[MEAN_PREVIOUS_LOGPROB] = float((token_weights * previous).sum())
    entropy_grads = None
    if arrays.entropy is not None:
        sums[MEAN_ENTROPY] = float((token_weights * arrays.entropy).sum())
        value -= config.entropy_coefficient * sums[MEAN_ENTROPY]
        entropy_grads = -config.entropy_coefficient * token_weights
    if config.poison_gradient:
        grads = grads + np.inf
    largest = float((-mask * logprobs).max())
    fields: dict[str, Any] = {
        "loss": FakeLoss(value=value, logprob_grads=grads, entropy_grads=entropy_grads),
        "sums": sums,
        "maxima": {LARGEST_SURPRISE: largest, SURPRISE_BELOW_100: largest - 100.0},
    }
    return LossOutput(**fields)


def value_probe_loss(inputs: LossInputs, config: ValueProbeConfig) -> LossOutput:
    """The formula of `ValueProbeConfig`, on one microbatch of numpy arrays."""
    arrays: Any = inputs
    values, counts, offsets = arrays.values, inputs.counts, arrays.offsets
    mask = arrays.loss_mask.astype(np.float64)
    counted = np.add.reduceat(mask, offsets[:-1]) > 0
    weights = counted * arrays.sequence_columns[PROBE_WEIGHT] / counts.num_loss_sequences
    errors = values - arrays.token_columns[ADVANTAGES]
    value = float((mask * (errors**2 / 2 + arrays.logprobs)).sum() / counts.num_loss_tokens)
    grads = mask * errors / counts.num_loss_tokens
    grads[offsets[1:] - 1] += weights
    loss = FakeLoss(
        value=value + float((weights * values[offsets[1:] - 1]).sum()), logprob_grads=np.zeros_like(values), value_grads=grads
    )
    fields: dict[str, Any] = {
        "loss": loss,
        "sums": {
            MEAN_VALUE: float((mask * values).sum() / counts.num_loss_tokens),
            TOKEN_SHARE: float(mask.sum() / counts.num_loss_tokens),
        },
        "maxima": {LARGEST_VALUE: float(np.where(arrays.loss_mask, values, -np.inf).max())},
    }
    return LossOutput(**fields)
