"""rlcore's side of a comparison: its advantages and its loss, as they are and under a convention of another framework.

Shapes: N sequences, each from its first loss token on and padded on the right to R tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from math import inf
from typing import Any

import numpy as np
import torch
from attrs import evolve, fields_dict, frozen
from numpy.typing import NDArray
from torch import Tensor

from rlcore.spi import ADVANTAGES, GENERATION_LOGPROBS, REFERENCE_LOGPROBS, GlobalCounts, LossInputs
from rlcore_bundles.peers.contract import Samples, Update
from rlcore_torchkit.rl.advantages import group_advantages, whitened
from rlcore_torchkit.rl.loss_config import LossConfig
from rlcore_torchkit.rl.policy_gradient import MAX_LOG_RATIO, kl_estimate, policy_gradient_loss, token_weights
from rlcore_torchkit.rl.sequences import Sequences

LOSS = "rlcore_torchkit.rl.policy_gradient:policy_gradient_loss"
"""The loss that can be compared, as LossSpec names it."""


@frozen(kw_only=True, eq=False)
class OwnSide:
    """The values that rlcore computes from a batch. `options` are those of the algorithm; the other fields are conventions
    that no option of rlcore's has, each at rlcore's own by default."""

    samples: Samples | None
    recorded: Tensor | None = None
    """floating [N, R]: the recorded advantages, where no option was changed; None computes them."""
    update: Update | None = None
    options: Mapping[str, Any]
    std_correction: int = 1
    """Subtracted from the number of values that a standard deviation is of."""
    keeps_lone_reward: bool = False
    """True where the only sample of a group has its reward as advantage, in place of 0."""
    whitens_in_root: bool = False
    """True where whitening divides by the root of the variance plus epsilon, in place of the deviation plus epsilon."""
    current_is_previous: bool = False
    """True where the ratio is 1: the policy's own log-probabilities, as a constant, are its denominator."""
    max_log_ratio: float = MAX_LOG_RATIO
    """Bound of the log ratio, from above; rlcore's is 20."""
    kl_is_bounded: bool = True
    """True where a KL estimate is clamped, its argument to 20 and its value to 10."""
    masks_truncated: bool = False
    """True where truncated samples have no loss."""
    counts_masked_sequences: bool = False
    """True where sequences without a loss token count in means over sequences."""
    counts_step_tokens: bool = False
    """True where a mean over tokens divides by those of the step over its updates, in place of the update's own."""
    entropy_by_token: bool = False
    """True where the entropy bonus is a mean over tokens whatever the mean of the loss is."""
    probability_bound: float = inf
    """Greatest change of a token's probability since the generator's, in the direction of its advantage, at which it trains."""
    generator_weight: float = 0.0
    """Weight of the squared log ratio to the generator."""
    weight_factor: float = 1.0
    """A constant factor of the loss."""
    metrics_by_sequence: bool = False
    """True where a metric is a mean over sequences, in place of that over tokens."""
    kl_metric_as_loss: bool = False
    """True where the reported KL divergence has the mean of the loss, in place of that over tokens."""

    def with_options(self, **options: Any) -> "OwnSide":
        """This side with other options; advantages are computed where one of theirs is among them."""
        recorded = None if any(name.startswith("advantage_") for name in options) else self.recorded
        return evolve(self, options={**self.options, **options}, recorded=recorded)

    def advantages(self) -> Tensor:
        """floating [N, R]."""
        assert self.samples is not None
        if self.recorded is not None:
            return self.recorded
        samples, options = self.samples, self.options
        rewards, groups = samples.rewards.double().numpy(), samples.group_ids.numpy()
        per_sample = self._of_samples(rewards, groups)
        mask = samples.mask.numpy()
        per_token = np.repeat(per_sample[:, None], mask.shape[1], 1) * mask
        if options["advantage_normalisation"] == "batch_whitening":
            per_token[mask] = self._whitened(per_token[mask], options["advantage_epsilon"])
        return torch.from_numpy(per_token).to(samples.rewards.dtype)

    def _of_samples(self, rewards: NDArray[np.float64], groups: NDArray[np.int64]) -> NDArray[np.float64]:
        options = self.options
        baseline, normalisation = options["advantage_baseline"], options["advantage_normalisation"]
        epsilon = options["advantage_epsilon"]
        if self.std_correction == 1 or normalisation not in ("std", "batch_std"):
            found = group_advantages(rewards, groups, baseline=baseline, normalisation=normalisation, epsilon=epsilon)
        else:
            found = group_advantages(rewards, groups, baseline=baseline, normalisation="none", epsilon=0.0)
            of = groups if normalisation == "std" else np.zeros_like(groups)
            divisors = np.array([rewards[of == one].std() + epsilon for one in of])
            found = np.where(found == 0, 0.0, found / np.where(divisors > 0, divisors, 1.0))
        if normalisation == "sample_whitening":
            # Of a baseline within each group, a group without a signal stays so.
            is_silent = (found == 0) & (baseline in ("group_mean", "leave_one_out"))
            found = np.where(is_silent, 0.0, self._whitened(found, epsilon))
        if self.keeps_lone_reward:
            _, inverse, sizes = np.unique(groups, return_inverse=True, return_counts=True)
            found = np.where(sizes[inverse] == 1, rewards, found)
        return found

    def _whitened(self, values: NDArray[np.float64], epsilon: float) -> NDArray[np.float64]:
        if self.std_correction == 1 and not self.whitens_in_root:
            return whitened(values, epsilon=epsilon)
        centred, variance = values - values.mean(), values.var(ddof=self.std_correction)
        divisor = math.sqrt(variance + epsilon) if self.whitens_in_root else math.sqrt(variance) + epsilon
        found: NDArray[np.float64] = centred / divisor
        return found

    def loss(self, update: Update) -> tuple[Tensor, dict[str, float]]:
        """The scalar that a trainer minimises, and its metrics."""
        mask = update.mask & ~update.truncated[:, None] if self.masks_truncated else update.mask
        current = update.logprobs
        previous = update.generation if self.options["previous_logprobs"] == "generation" else update.previous
        if self.current_is_previous:
            previous = current.detach()
        if self.probability_bound < inf:
            moved = (current.exp() - update.generation.exp()).detach() * update.advantages.detach().sign()
            update = replace(update, advantages=update.advantages * (moved <= self.probability_bound))
        inputs = self._inputs(replace(update, mask=mask), current, previous)
        # KL and entropy are added here where their convention is another than the loss's own.
        own_kl = not self.kl_is_bounded and self.options["kl_coefficient"] > 0
        config = self._config(kl=not own_kl, entropy=not self.entropy_by_token)
        output = policy_gradient_loss(inputs, config)
        total, metrics = output.loss, {name: float(value) for name, value in {**output.sums, **output.maxima}.items()}
        weights = self._weights(inputs, config, current.dtype)
        delta = (current - previous).reshape(-1)
        if self.max_log_ratio > MAX_LOG_RATIO:
            total = total + self._beyond_bound(inputs, delta, weights)
        if own_kl:
            kl = self._unbounded_kl(current.reshape(-1), update.reference.reshape(-1))
            total = total + self.options["kl_coefficient"] * (weights * kl).sum()
            metrics["kl"] = float((kl * inputs.loss_mask).sum().detach() / max(inputs.counts.num_loss_tokens, 1))
        if self.generator_weight:
            total = total + self.generator_weight * (weights * (current - update.generation).square().reshape(-1)).sum()
        if self.entropy_by_token:
            mean = (update.entropies * mask).sum() / mask.sum().clamp(min=1)
            total = total - self.options["entropy_coefficient"] * mean
        if self.kl_metric_as_loss and "kl" in metrics:
            kl = kl_estimate((update.reference - current).detach().reshape(-1), self.options["kl_estimator"])
            metrics["kl"] = float((weights * kl).sum())
        return total * self.weight_factor, self._by_sequence(update) if self.metrics_by_sequence else metrics

    def _by_sequence(self, update: Update) -> dict[str, float]:
        side, rows = evolve(self, metrics_by_sequence=False), [number for number, one in enumerate(update.mask) if one.any()]
        names = [one.name for one in fields(update) if isinstance(getattr(update, one.name), Tensor)]
        found = [
            side.loss(replace(update, **{name: getattr(update, name)[number : number + 1] for name in names}))[1]
            for number in rows
        ]
        return {name: sum(one[name] for one in found) / len(found) for name in found[0]}

    def _config(self, *, kl: bool, entropy: bool) -> LossConfig:
        options = {name: value for name, value in self.options.items() if name in fields_dict(LossConfig)}
        dropped = ({} if kl else {"kl_coefficient": 0.0}) | ({} if entropy else {"entropy_coefficient": 0.0})
        return LossConfig(**options | dropped)

    def _inputs(self, update: Update, current: Tensor, previous: Tensor) -> LossInputs:
        count, width = update.mask.shape
        if self.max_log_ratio < MAX_LOG_RATIO:
            current = previous + (current - previous).clamp(max=self.max_log_ratio)
        columns = {
            ADVANTAGES: update.advantages,
            GENERATION_LOGPROBS: update.generation if self.options["previous_logprobs"] != "generation" else previous,
            REFERENCE_LOGPROBS: update.reference,
        }
        num_tokens = update.num_step_tokens / update.num_updates if self.counts_step_tokens else int(update.mask.sum())
        num_sequences = count if self.counts_masked_sequences else int(update.mask.any(1).sum())
        return LossInputs(
            logprobs=current.reshape(-1),
            entropy=update.entropies.reshape(-1),
            loss_mask=update.mask.reshape(-1),
            offsets=torch.arange(count + 1) * width,
            token_columns={name: column.reshape(-1) for name, column in columns.items()},
            sequence_columns={},
            counts=GlobalCounts(num_loss_tokens=num_tokens, num_loss_sequences=num_sequences),  # type: ignore[arg-type]
            previous_logprobs=previous.reshape(-1),
        )

    def _weights(self, inputs: LossInputs, config: LossConfig, dtype: torch.dtype) -> Tensor:
        return token_weights(
            config.loss_normalisation,
            sequences=Sequences(inputs.loss_mask, inputs.offsets),
            counts=inputs.counts,
            constant_length=config.constant_length,
            dtype=dtype,
        )

    def _beyond_bound(self, inputs: LossInputs, delta: Tensor, weights: Tensor) -> Tensor:
        """The part of a clipped loss that the bound of the log ratio takes away: at A < 0, where no dual clip holds."""
        if self.options["dual_clip"] is not None or self.options["ratio"] != "token":
            return delta.sum() * 0.0
        advantages = inputs.token_columns[ADVANTAGES]
        beyond = inputs.loss_mask & (delta > MAX_LOG_RATIO) & (advantages < 0)
        more = torch.where(beyond, delta, MAX_LOG_RATIO).exp() - math.exp(MAX_LOG_RATIO)
        return (weights * torch.where(beyond, -advantages * more, 0.0)).sum()

    def _unbounded_kl(self, current: Tensor, reference: Tensor) -> Tensor:
        """floating [T]: the estimates without clamps, with the gradient that the options say."""
        delta = reference - current
        kl = {"k1": -delta, "k2": delta.square() / 2, "k3": torch.expm1(delta) - delta}[self.options["kl_estimator"]]
        return kl * torch.exp(current - current.detach()) if self.options["kl_gradient"] == "expectation" else kl
