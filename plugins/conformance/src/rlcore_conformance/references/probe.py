"""The loss that the kit trains with: it reads everything that a loss is given, so that a wrong piece of it shows.

Σ_t m_t · (−A_t · logprob_t − c · entropy_t + b · previous_t · logprob_t) / loss tokens
+ Σ_n (w_n · mean of the masked logprobs of n ± their sum) / loss sequences

where b is 0 without log-probabilities at the start of the step, and the last sum is there only where neighbours are compared:
it is added for a microbatch's first sequence, subtracted for its second, and so on.
"""

import numpy as np
from attrs import frozen

from rlcore.spi import ADVANTAGES, GENERATION_LOGPROBS, MISMATCH_METRICS, TokenBatch
from rlcore_conformance.references.reference import Float64Array

PROBE_WEIGHT = "probe_weight"
"""float32 [N], the sequence column w."""
MEAN_LOGPROB = "probe/mean_logprob"
MEAN_ENTROPY = "probe/mean_entropy"
MEAN_PREVIOUS_LOGPROB = "probe/mean_previous_logprob"
TOKEN_SHARE = "probe/token_share"
SEQUENCE_SHARE = "probe/sequence_share"
MEAN_VALUE = "probe/mean_value"
LARGEST_VALUE = "probe/largest_value"
LARGEST_SURPRISE = "probe/largest_surprise"
SURPRISE_BELOW_100 = "probe/surprise_below_100"
"""The largest surprise less 100: a maximum that is negative."""


PREVIOUS_COEFFICIENT = 0.2
"""The b of the formula."""


@frozen(kw_only=True)
class ProbeConfig:
    """Constants of the probe loss."""

    entropy_coefficient: float = 0.0
    """The c of the formula."""
    neighbours: bool = False
    """Compares each sequence with the next one."""
    poison_gradient: bool = False
    """Makes the gradient infinite while the loss stays finite."""


@frozen(kw_only=True)
class ValueProbeConfig:
    """The loss that the kit trains values with has no constants:

    Σ_t m_t · ((v_t − A_t)² / 2 + logprob_t) / loss tokens + Σ_n w_n · v at the last token of n / loss sequences

    over the tokens t of the loss mask and the sequences n that have such tokens. Log-probabilities do not exist, so they are
    to be zeros.
    """


def expected_value_probe(batch: TokenBatch, values: Float64Array) -> tuple[float, dict[str, float]]:
    """Loss and metrics of a whole optimizer step in one batch, in float64, from the values [T]."""
    counts, mask = batch.counts(), batch.loss_mask.astype(np.float64)
    loss = (mask * (values - batch.token_columns[ADVANTAGES]) ** 2).sum() / 2 / counts.num_loss_tokens
    lasts, counted = values[batch.offsets[1:] - 1], batch.loss_lengths > 0
    loss += (counted * batch.sequence_columns[PROBE_WEIGHT] * lasts).sum() / counts.num_loss_sequences
    return float(loss), {
        MEAN_VALUE: float((mask * values).sum() / counts.num_loss_tokens),
        LARGEST_VALUE: float(values[batch.loss_mask].max()),
        TOKEN_SHARE: 1.0,
    }


def expected_mismatch(batch: TokenBatch, logprobs: Float64Array) -> dict[str, float]:
    """MISMATCH_METRICS of a whole optimizer step in one batch, in float64, from the trainer's log-probabilities [T]."""
    delta = (logprobs - batch.token_columns[GENERATION_LOGPROBS])[batch.loss_mask]
    values = np.exp(np.abs(delta)), np.exp(delta) - 1 - delta, np.exp(delta)
    return {name: float(value.mean()) for name, value in zip(MISMATCH_METRICS, values, strict=True)}


def expected_probe(
    batch: TokenBatch,
    logprobs: Float64Array,
    entropy: Float64Array | None,
    config: ProbeConfig,
    previous: Float64Array | None = None,
) -> tuple[float, dict[str, float]]:
    """Loss and metrics of a whole optimizer step in one batch, in float64, from log-probabilities and entropies [T], and those
    at the start of the step."""
    counts, mask = batch.counts(), batch.loss_mask.astype(np.float64)
    num_tokens = counts.num_loss_tokens
    loss = -(mask * batch.token_columns[ADVANTAGES] * logprobs).sum() / num_tokens
    per_sequence = np.add.reduceat(mask, batch.offsets[:-1])
    means = np.add.reduceat(mask * logprobs, batch.offsets[:-1]) / np.maximum(per_sequence, 1.0)
    loss += (batch.sequence_columns[PROBE_WEIGHT] * means).sum() / counts.num_loss_sequences
    if config.neighbours:
        sums = np.add.reduceat(mask * logprobs, batch.offsets[:-1])
        loss += (sums[::2].sum() - sums[1::2].sum()) / counts.num_loss_sequences
    metrics = {
        MEAN_LOGPROB: float((mask * logprobs).sum() / num_tokens),
        TOKEN_SHARE: 1.0,
        SEQUENCE_SHARE: 1.0,
        LARGEST_SURPRISE: float((-mask * logprobs).max()),
        SURPRISE_BELOW_100: float((-mask * logprobs).max()) - 100.0,
    }
    if entropy is not None:
        loss -= config.entropy_coefficient * (mask * entropy).sum() / num_tokens
        metrics[MEAN_ENTROPY] = float((mask * entropy).sum() / num_tokens)
    if previous is not None:
        loss += PREVIOUS_COEFFICIENT * (mask * previous * logprobs).sum() / num_tokens
        metrics[MEAN_PREVIOUS_LOGPROB] = float((mask * previous).sum() / num_tokens)
    return float(loss), metrics
