"""verl's formulas in float64 numpy, of a batch as a matrix: one row for each answer, one column for each token."""

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@frozen(kw_only=True)
class Batch:
    """Log-probabilities of the answers' tokens, [B, T] each, and what the answers earned, [B]."""

    policy: Floats
    old: Floats
    rollout: Floats
    reference: Floats
    entropy: Floats
    advantages: Floats
    mask: Bools


def aggregate(losses: Floats, mask: Bools, mode: str, scale: float) -> float:
    """A loss of tokens as one number, by loss_agg_mode."""
    of_rows = (losses * mask).sum(1)
    if mode == "token-mean":
        return float(of_rows.sum() / mask.sum())
    if mode == "seq-mean-token-mean":
        return float((of_rows / mask.sum(1)).mean())
    return float(of_rows.mean() / (scale if mode == "seq-mean-token-sum-norm" else 1.0))


def policy_loss(batch: Batch, mode: str, *, low: float, high: float, dual: float = 3.0, chosen: Bools | None = None) -> Floats:
    """The loss of each token before it is weighed and aggregated; of `geo_mean` each answer's, at each of its tokens."""
    logs, advantages = batch.policy - batch.old, batch.advantages[:, None]
    ratio = np.exp(logs)
    lengths = batch.mask.sum(1, keepdims=True)
    if mode == "gspo":
        ratio = np.exp((logs * batch.mask).sum(1, keepdims=True) / lengths)
    clipped = np.clip(ratio, 1 - low, 1 + high)
    plain = np.maximum(-advantages * ratio, -advantages * clipped)
    if mode == "vanilla":
        return np.where(advantages < 0, np.minimum(plain, -dual * advantages), plain)
    if mode in ("gspo", "clip_cov"):
        return plain if chosen is None else plain * ~chosen
    if mode == "kl_cov":
        assert chosen is not None
        return -advantages * ratio + 0.1 * np.abs(logs) * chosen
    if mode == "sapo":
        tau = np.where(advantages > 0, 1.0, 1.05)
        return -advantages * 4 / tau / (1 + np.exp(-tau * (ratio - 1)))
    if mode == "cispo":
        return -clipped * advantages * batch.policy
    if mode == "gpg":
        return -advantages * batch.policy
    assert mode == "geo_mean", mode
    sign = np.sign(advantages)
    bounded = sign * np.minimum(sign * logs, sign * np.clip(logs, -low, high))
    return np.broadcast_to(-advantages * np.exp((bounded * batch.mask).sum(1, keepdims=True) / lengths), logs.shape)


def kl_estimate(policy: Floats, reference: Floats, kind: str) -> Floats:
    """kl_penalty without its clamps."""
    delta = policy - reference
    return {"kl": delta, "mse": delta**2 / 2, "low_var_kl": np.exp(-delta) + delta - 1}[kind]


def weights(batch: Batch, level: str, *, low: float = 0.0, high: float, masks: bool = False) -> Floats:
    """rollout_is: how much likelier the trainer finds a token, or an answer, than the generator did."""
    logs = (batch.old - batch.rollout) * batch.mask
    ratio = np.exp(logs if level == "token" else np.broadcast_to(logs.sum(1, keepdims=True), logs.shape))
    return np.where((ratio >= low) & (ratio <= high), ratio, 0.0) if masks else np.minimum(ratio, high)


def advantages(rewards: Floats, groups: NDArray[np.int64], kl: Floats, mask: Bools, name: str, coefficient: float) -> Floats:
    """[B, T]: what an estimator makes of rewards [B] less the divergence kl [B, T]."""
    penalised = rewards - coefficient * (kl * mask).sum(1)
    if name == "reinforce_plus_plus":
        to_go = rewards[:, None] - coefficient * np.cumsum((kl * mask)[:, ::-1], 1)[:, ::-1]
        return whitened(to_go, mask)
    found = np.zeros_like(penalised)
    for group in np.unique(groups):
        of = groups == group
        centred, number = penalised[of] - penalised[of].mean(), of.sum()
        if name == "rloo":
            centred = centred * number / (number - 1)
        elif name == "grpo":
            centred = centred / (penalised[of].std(ddof=1) + 1e-6)
        found[of] = centred
    spread = np.broadcast_to(found[:, None], mask.shape)
    return whitened(spread, mask) if name == "reinforce_plus_plus_baseline" else spread * mask


def whitened(values: Floats, mask: Bools) -> Floats:
    """masked_whiten, over the tokens of the batch."""
    inside = values[mask]
    return np.where(mask, (values - inside.mean()) / np.sqrt(inside.var(ddof=1) + 1e-8), 0.0)


def rate(step: int, *, warmup: int, steps: int, kind: str = "constant", least: float = 0.0) -> float:
    """The learning rate of a training step, counted from 0, as a share of the peak: get_*_schedule_with_warmup."""
    if step < warmup:
        return step / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    if kind == "cosine":
        return max(least, (1 - least) / 2 * np.cos(np.pi * progress) + (1 + least) / 2)
    return 1.0 if kind == "constant" else 1 - (1 - least) * progress
