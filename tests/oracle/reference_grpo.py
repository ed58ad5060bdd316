"""GRPO in float64, written from the published formulas alone: plain numpy and torch, nothing of rlcore.

L tokens of a sequence; everything per token is aligned with the token that it describes.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

MAX_LOG_RATIO = 20.0
MAX_KL = 10.0
MIN_COMPARED = 256
"""Tokens of the present weights below which a step with older ones is not compared with the generator."""


@frozen(kw_only=True)
class Options:
    """The recipe's, as far as GRPO and its optimizer go."""

    seed: int
    num_steps: int
    minibatches_per_step: int
    max_staleness: int
    temperature: float
    top_p: float
    epochs_per_step: int = 1
    masked: bool
    """Whether the trainer's distributions are those of the tokens that top-p kept."""
    rescores: bool
    """Whether tokens of old weights count as of the present ones."""
    previous: str
    """"generation" or "trainer"."""
    clip_low: float
    clip_high: float
    kl_coefficient: float
    importance_maximum: float
    advantage_epsilon: float
    loss_normalisation: str
    """"token" or "sequence"."""
    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float
    warmup_steps: int
    min_learning_rate_ratio: float

    @property
    def updates_per_step(self) -> int:
        return self.minibatches_per_step * self.epochs_per_step


def advantages(rewards: Sequence[float], groups: Sequence[int], epsilon: float) -> list[float]:
    """(r - mean) / (std + epsilon) within each group, the std with ddof = 1; 0 where a group's rewards are equal.

    DeepSeekMath (arXiv:2402.03300), section 4.1.
    """
    found = [0.0] * len(rewards)
    for group in set(groups):
        members = [index for index, own in enumerate(groups) if own == group]
        values = np.asarray([rewards[index] for index in members], np.float64)
        if values.max() == values.min():
            continue
        for index, value in zip(members, (values - values.mean()) / (values.std(ddof=1) + epsilon), strict=True):
            found[index] = float(value)
    return found


def minibatch_groups(num_groups: int, step: int, options: Options) -> list[list[int]]:
    """The groups of each of a step's planned updates: shuffled by the run's seed and the step, counted from 1, then cut into
    as many parts, whose sizes differ by one group at most; once more for each epoch."""
    if options.minibatches_per_step == 1:
        return [list(range(num_groups))] * options.epochs_per_step
    purpose = 3  # that of minibatches among the streams of randomness of a run
    random = np.random.default_rng([options.seed, purpose, step])
    size, longer = divmod(num_groups, options.minibatches_per_step)
    sizes = [size + (number < longer) for number in range(options.minibatches_per_step)]
    ends, found = np.cumsum(sizes), []
    for _ in range(options.epochs_per_step):
        order = random.permutation(num_groups)
        found += [order[end - own : end].tolist() for end, own in zip(ends, sizes, strict=True)]
    return found


def learning_rate(planned_update: int, options: Options) -> float:
    """Of an update by its place among those that the run plans, counted from 0: a linear warm-up, then a linear decay."""
    if planned_update < options.warmup_steps:
        return options.learning_rate * (planned_update + 1) / options.warmup_steps
    total = options.num_steps * options.updates_per_step
    progress = (planned_update - options.warmup_steps) / (total - options.warmup_steps)
    lowest = options.min_learning_rate_ratio
    return options.learning_rate * (lowest + (1 - lowest) * (1 - progress))


@frozen(kw_only=True, eq=False)
class TokenInputs:
    """Of one sequence's loss tokens, float64 [M] each."""

    current: Tensor
    """With a gradient."""
    generation: Tensor
    at_step_start: Tensor
    """The trainer's, with the weights that the step started from."""
    reference: Tensor | None
    entropy: Tensor
    advantage: float
    is_present: Tensor
    """bool: whether the weights that the step started from said it."""


@frozen(kw_only=True, eq=False)
class TokenTerms:
    """Of the same tokens."""

    loss: Tensor
    """With a gradient, before the normalisation."""
    ratio: Tensor
    correction: Tensor
    """The importance weight before its bound."""
    kl: Tensor | None


def token_terms(inputs: TokenInputs, options: Options) -> TokenTerms:
    """The clipped objective (arXiv:1707.06347, equation 7; two bounds as in arXiv:2503.14476, equation 10), weighed by
    truncated importance sampling, and the k3 estimate of KL(policy ‖ reference) with the gradient of its expectation."""
    previous = inputs.generation if options.previous == "generation" else inputs.at_step_start
    ratio = (inputs.current - previous).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    bounded = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    loss = -torch.minimum(inputs.advantage * ratio, inputs.advantage * bounded)
    correction = (previous - inputs.generation).exp()
    if options.previous == "trainer":
        loss = loss * correction.clamp(max=options.importance_maximum)
    kl = None
    if inputs.reference is not None:
        difference = (inputs.reference - inputs.current).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        kl = (difference.exp() - 1 - difference).clamp(-MAX_KL, MAX_KL) * (inputs.current - inputs.current.detach()).exp()
        loss = loss + options.kl_coefficient * kl
    return TokenTerms(loss=loss, ratio=ratio.detach(), correction=correction, kl=None if kl is None else kl.detach())


def figures(inputs: Sequence[TokenInputs], terms: Sequence[TokenTerms], options: Options) -> dict[str, float]:
    """The update's metrics as docs/run-directory.md defines them, but for the loss and what the optimizer reports."""
    ratio = torch.cat([each.ratio for each in terms])
    advantage = torch.cat([torch.full_like(each.ratio, own.advantage) for own, each in zip(inputs, terms, strict=True)])
    high = ((advantage > 0) & (ratio > 1 + options.clip_high)).double().mean().item()
    low = ((advantage < 0) & (ratio < 1 - options.clip_low)).double().mean().item()
    found = {
        "ratio_mean": ratio.mean().item(),
        "ratio_max": ratio.max().item(),
        "clip_fraction": high + low,
        "clip_fraction_high": high,
        "clip_fraction_low": low,
        "entropy": torch.cat([own.entropy for own in inputs]).mean().item(),
    }
    if options.previous == "trainer":
        correction = torch.cat([each.correction for each in terms])
        found["importance_truncated"] = (correction > options.importance_maximum).double().mean().item()
    if options.kl_coefficient:
        found["kl"] = torch.cat([each.kl for each in terms if each.kl is not None]).mean().item()
    return found


def agreement(inputs: Sequence[TokenInputs]) -> dict[str, float]:
    """How far the trainer's probabilities are from the generator's, at the weights that the step started from and with the same
    sampling distribution: over the tokens of these weights."""
    delta = torch.cat([(own.at_step_start - own.generation)[own.is_present] for own in inputs])
    return {
        "token_mult_prob_error": delta.abs().exp().mean().item(),
        "generation_kl_error": (delta.exp() - 1 - delta).mean().item(),
        "importance_ratio": delta.exp().mean().item(),
    }


class AdamW:
    """arXiv:1711.05101, algorithm 2, after the gradient was scaled to a global L2 norm of at most `max_grad_norm`. Matrices
    decay, vectors do not."""

    def __init__(self, weights: Sequence[Tensor], options: Options) -> None:
        self.weights, self.options = list(weights), options
        self.first = [torch.zeros_like(weight) for weight in weights]
        self.second = [torch.zeros_like(weight) for weight in weights]
        self.count = 0

    def step(self, gradients: Sequence[Tensor], rate: float) -> float:
        """Change the weights in place; returns the norm before it was scaled."""
        options, (beta1, beta2) = self.options, self.options.betas
        norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))
        scale = min(1.0, options.max_grad_norm / norm) if norm > 0 else 1.0
        self.count += 1
        for weight, gradient, first, second in zip(self.weights, gradients, self.first, self.second, strict=True):
            scaled = gradient * scale
            first.copy_(beta1 * first + (1 - beta1) * scaled)
            second.copy_(beta2 * second + (1 - beta2) * scaled**2)
            mean, square = first / (1 - beta1**self.count), second / (1 - beta2**self.count)
            decay = options.weight_decay if weight.ndim > 1 else 0.0
            weight.copy_(weight - rate * (decay * weight + mean / (square.sqrt() + options.eps)))
        return norm
