"""NeMo-RL's losses and advantages in float64, restated from its code at the commit of nemo_rl_defaults.json."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from rlcore.spi import ADVANTAGES, GENERATION_LOGPROBS, REFERENCE_LOGPROBS, GlobalCounts, LossInputs

LENGTHS = (5, 2, 7, 1, 4, 3)


@frozen(eq=False)
class Step:
    """Log-probabilities and advantages of a step's answers, [T] each; every token counts."""

    current: Tensor
    previous: Tensor
    generation: Tensor
    reference: Tensor
    advantages: Tensor
    offsets: Tensor

    @classmethod
    def drawn(cls, seed: int, spread: float = 0.3, *, is_first: bool = False) -> "Step":
        """Random values; `is_first`: the policy is still the one before the step."""
        random = np.random.default_rng(seed)
        generation = -random.exponential(1.0, sum(LENGTHS)) - 0.05

        def near(width: float) -> Tensor:
            return torch.tensor(np.minimum(generation + random.normal(0, width, len(generation)), -1e-3))

        previous = near(spread / 3)
        current = previous.clone() if is_first else near(spread)
        advantages = torch.tensor(np.repeat(random.normal(0, 1, len(LENGTHS)), LENGTHS))
        offsets = torch.tensor(np.concatenate([[0], np.cumsum(LENGTHS)]))
        return cls(current.requires_grad_(), previous, torch.tensor(generation), near(spread), advantages, offsets)

    def inputs(self) -> LossInputs:
        """Return the inputs of rlcore's losses."""
        return LossInputs(
            logprobs=self.current,
            previous_logprobs=self.previous,
            entropy=None,
            loss_mask=torch.ones(len(self.current), dtype=torch.bool),
            offsets=self.offsets,
            token_columns={
                GENERATION_LOGPROBS: self.generation,
                REFERENCE_LOGPROBS: self.reference,
                ADVANTAGES: self.advantages,
            },
            sequence_columns={},
            counts=GlobalCounts(num_loss_tokens=len(self.current), num_loss_sequences=len(LENGTHS)),
        )

    def means(self, values: Tensor) -> Tensor:
        """The mean of each answer's tokens, at each of them."""
        parts = [part.mean().expand(len(part)) for part in values.split(list(LENGTHS))]
        return torch.cat(parts)

    def reduced(self, values: Tensor, *, of_tokens: bool) -> Tensor:
        """The mean over tokens, or over answers of the means of their tokens."""
        return values.mean() if of_tokens else torch.stack([part.mean() for part in values.split(list(LENGTHS))]).mean()


def kl_term(step: Step, settings: Mapping[str, Any]) -> Tensor:
    """[T]: the estimate of each token, whose weight carries the gradient of the token's own probability."""
    bound, most = settings.get("kl_input_clamp_value", 20.0), settings.get("kl_output_clamp_value", 10.0)
    gap = (step.reference - step.current).clamp(-bound, bound)
    kind = settings.get("reference_policy_kl_type", "k3")
    estimate = {"k1": -gap, "k2": gap**2 / 2, "k3": gap.exp() - 1 - gap}[kind]
    drawn_by = step.generation if settings.get("use_on_policy_kl_approximation") else step.current.detach()
    return ((step.current - drawn_by).exp() * estimate).clamp(-most, most)


def weights(step: Step, settings: Mapping[str, Any]) -> Tensor:
    """[T]: the trainer's probability over the generator's, of a token or its answer, within bounds."""
    if not settings.get("use_importance_sampling_correction"):
        return torch.ones_like(step.previous)
    gap = step.previous - step.generation
    is_whole = settings.get("sequence_level_importance_ratios")
    weight = (step.means(gap) * torch.tensor(np.repeat(LENGTHS, LENGTHS)) if is_whole else gap).exp()
    kind = settings.get("truncated_importance_sampling_type")
    low, high = (
        settings.get("truncated_importance_sampling_ratio_min") or 0.0,
        settings.get("truncated_importance_sampling_ratio"),
    )
    if kind == "tis":
        return weight.clamp(low, high)
    if kind == "icepop":
        return weight * ((weight >= low) & (weight <= high))
    if kind == "seq-mask-tis":
        middle = step.means(gap).exp()
        return weight * ((middle >= low) & (middle <= high))
    return weight


def policy_loss(step: Step, settings: Mapping[str, Any]) -> Tensor:
    """The clipped objective or one of its kin, with the KL term."""
    low, high = 1 - settings.get("ratio_clip_min", 0.2), 1 + settings.get("ratio_clip_max", 0.2)
    gap, advantages = step.current - step.previous, step.advantages
    ratio = (step.means(gap) if settings.get("sequence_level_importance_ratios") else gap).exp()
    if settings.get("force_on_policy_ratio"):
        loss = -advantages * (step.current - step.current.detach()).exp()
    elif settings.get("disable_ppo_ratio"):
        loss = -advantages * step.current
    elif settings.get("use_cispo"):
        loss = -advantages * ratio.clamp(low, high).detach() * step.current
    else:
        loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    if dual := settings.get("ratio_clip_c"):
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual), loss)
    of_tokens = settings.get("token_level_loss", True)
    total = step.reduced(weights(step, settings) * loss, of_tokens=of_tokens)
    if (penalty := settings.get("reference_policy_kl_penalty", 0.0)) and not settings.get("use_kl_in_reward"):
        total = total + penalty * step.reduced(kl_term(step, settings), of_tokens=of_tokens)
    return total


def positive_nll(step: Step, rewards: np.ndarray) -> Tensor:
    """The mean of -log p over the tokens of answers with a reward above 0."""
    return -step.current[torch.tensor(np.repeat(rewards > 0, LENGTHS))].mean()


def distillation_loss(step: Step, settings: Mapping[str, Any]) -> Tensor:
    """A token's advantage is the teacher's log-probability less the trainer's before the step."""
    advantages = step.reference - step.previous
    return step.reduced(-advantages * weights(step, settings) * step.current, of_tokens=True)


def pair_loss(step: Step, settings: Mapping[str, Any]) -> Tensor:
    """DPO's, with the likelihood of the chosen answers, which come first of each two."""
    gains = torch.stack(
        [
            part.mean() if settings.get("preference_average_log_probs") else part.sum()
            for part in (step.current - step.reference).split(list(LENGTHS))
        ]
    ).view(-1, 2)
    learned = torch.stack(
        [-(part.mean() if settings.get("sft_average_log_probs") else part.sum()) for part in step.current.split(list(LENGTHS))]
    ).view(-1, 2)
    lead = settings.get("reference_policy_kl_penalty", 0.05) * (gains[:, 0] - gains[:, 1])
    pairs, chosen = -torch.nn.functional.logsigmoid(lead).mean(), learned[:, 0].mean()
    return settings.get("preference_loss_weight", 1.0) * pairs + settings.get("sft_loss_weight", 0.0) * chosen


def group_statistics(rewards: np.ndarray, *, leaves_out: bool) -> tuple[np.ndarray, np.ndarray]:
    """Baseline and deviation of each of a group's samples: of the group, or of the others in it."""
    size = len(rewards)
    kept = 1.0 - np.eye(size) if leaves_out else np.ones((size, size))
    number = kept.sum(1)
    baseline = kept @ rewards / number
    spread = (kept @ rewards**2 / number - baseline**2) * number / (number - 1)
    return baseline, np.sqrt(np.maximum(spread, 0.0))


def advantages(groups: np.ndarray, *, leaves_out: bool, normalises: bool) -> np.ndarray:
    """[G, N] of rewards [G, N]: less the baseline, over the deviation where there is one."""
    found = np.empty_like(groups)
    for number, rewards in enumerate(groups):
        baseline, deviation = group_statistics(rewards, leaves_out=leaves_out)
        found[number] = rewards - baseline
        if normalises:
            found[number] /= np.where(deviation > 0, deviation + 1e-6, 1.0)
    return found


def whitened(values: np.ndarray) -> np.ndarray:
    """Return values less their mean, divided by their deviation."""
    return (values - values.mean()) / np.sqrt(max(values.var(), 1e-8))
