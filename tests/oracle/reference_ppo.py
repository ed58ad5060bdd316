"""PPO with a critic in float64, from the published formulas and the samples that a run recorded: plain numpy and torch.

Policy and critic are transformers' own models. Everything per token is aligned with the token that it describes, L tokens of a
sequence; V_t is what the critic tells after token t, so that the step which says token t begins with V_{t-1}.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor, nn
from transformers import AutoModel

from .recorded import Sample
from .reference_grpo import AdamW, Options, learning_rate, minibatch_groups
from .reference_run import Policy, rms_norm


class Critic:
    """A model of float64 weights with one linear output a token, which begins at 0."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModel.from_pretrained(directory, dtype=torch.float64)
        for module in self.model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = rms_norm(module)
        self.score = nn.Parameter(torch.zeros(1, self.model.config.hidden_size, dtype=torch.float64))

    def values(self, sample: Sample) -> Tensor:
        """float64 [L]"""
        hidden = self.model(input_ids=torch.from_numpy(sample.tokens)[None], use_cache=False).last_hidden_state[0]
        return (hidden @ self.score.T)[:, 0]

    def named(self) -> dict[str, Tensor]:
        """By the names of transformers' models for sequence classification."""
        return {**{f"model.{name}": weight for name, weight in self.model.named_parameters()}, "score.weight": self.score}


@frozen(kw_only=True)
class PpoOptions:
    """The recipe's, as far as they are PPO's."""

    policy: Options
    critic_learning_rate: float
    critic_max_grad_norm: float
    warmup_steps: int
    gamma: float
    gae_lambda: float
    bootstrap_truncated: bool
    value_clip: float
    kl_coefficient: float
    entropy_coefficient: float


class PpoRun:
    """Runs once; the weights are then the last ones."""

    def __init__(self, model: Path, options: PpoOptions) -> None:
        self.options = options
        own, planned = options.policy, options.policy.num_steps
        self.policy, self.initial, self.critic = Policy(model, own.temperature), Policy(model, own.temperature), Critic(model)
        self.of_policy = evolve(own, num_steps=planned - options.warmup_steps)
        self.of_critic = evolve(own, learning_rate=options.critic_learning_rate, max_grad_norm=options.critic_max_grad_norm)
        self.policy_weights, self.critic_weights = list(self.policy.model.parameters()), list(self.critic.named().values())
        with torch.no_grad():
            self.policy_adam = AdamW([weight.detach() for weight in self.policy_weights], self.of_policy)
            self.critic_adam = AdamW([weight.detach() for weight in self.critic_weights], self.of_critic)

    def step(self, number: int, samples: Sequence[Sample]) -> Mapping[str, float]:
        """A step, counted from 1; its line in metrics.jsonl."""
        options, found = self.options, defaultdict[str, list[float]](list)
        with torch.no_grad():
            at_start, reference = self._logprobs(self.policy, samples)[0], self._logprobs(self.initial, samples)[0]
            told = [self.critic.values(own).numpy() for own in samples]
        advantages, returns = self._estimated(samples, reference, told)
        targets = np.concatenate(returns)
        before = np.concatenate([values[steps_of(own) - 1] for own, values in zip(samples, told, strict=True)])
        every = np.concatenate(advantages)
        white = [(each - every.mean()) / (every.std(ddof=1) + 1e-8) for each in advantages]
        groups = minibatch_groups(len({own.group for own in samples}), number, options.policy)
        for place, members in enumerate(groups):
            chosen = [index for index, own in enumerate(samples) if own.group in members]
            planned = (number - 1) * options.policy.minibatches_per_step + place
            if number > options.warmup_steps:
                update = planned - options.warmup_steps * options.policy.minibatches_per_step
                loss = self._policy_loss(
                    [samples[index] for index in chosen],
                    [white[index] for index in chosen],
                    [at_start[index] for index in chosen],
                )
                self._apply("", loss, self.policy_weights, self.policy_adam, learning_rate(update, self.of_policy), found)
            loss = self._critic_loss(
                [samples[index] for index in chosen], [returns[index] for index in chosen], [told[index] for index in chosen]
            )
            self._apply("critic/", loss, self.critic_weights, self.critic_adam, learning_rate(planned, self.of_critic), found)
        return {
            **{name: float(np.mean(values)) for name, values in found.items()},
            "critic/value_mean": float(before.mean()),
            "critic/return_mean": float(targets.mean()),
            "critic/explained_variance": float(1 - (targets - before).var() / targets.var()),
        }

    def _logprobs(self, policy: Policy, samples: Sequence[Sample]) -> tuple[list[Tensor], list[Tensor]]:
        """float64 [M] each, of loss tokens: log-probabilities, and the entropy of the distributions that they are of."""
        distributions = policy.distributions(samples)
        places = [torch.from_numpy(steps_of(own)) for own in samples]
        tokens = [torch.from_numpy(own.tokens) for own in samples]
        chosen = [whole[place, ids[place]] for whole, place, ids in zip(distributions, places, tokens, strict=True)]
        entropy = [-(whole.exp() * whole).sum(-1)[place] for whole, place in zip(distributions, places, strict=True)]
        return chosen, entropy

    def _estimated(
        self, samples: Sequence[Sample], reference: Sequence[Tensor], told: Sequence[np.ndarray]
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Advantages Σ_l (γλ)^l δ_{k+l} (arXiv:1506.02438, equation 16) and returns of each sample's loss tokens; rewards lose
        the k1 estimate of the divergence from the initial policy, token by token."""
        options = self.options
        advantages, returns = [], []
        for own, initial, values in zip(samples, reference, told, strict=True):
            steps = steps_of(own)
            rewards = -options.kl_coefficient * (own.generation_logprobs[steps].astype(np.float64) - initial.numpy())
            rewards += self._earned(own)
            following = np.append(values[steps[1:] - 1], values[-1] if options.bootstrap_truncated and own.is_cut else 0.0)
            deltas = rewards + options.gamma * following - values[steps - 1]
            decay = options.gamma * options.gae_lambda
            found = np.array([sum(decay ** (j - k) * deltas[j] for j in range(k, len(steps))) for k in range(len(steps))])
            advantages.append(found)
            returns.append(found + values[steps - 1])
        return advantages, returns

    def _earned(self, sample: Sample) -> np.ndarray:
        """float64 [M]: what each loss token earned. Here all of it at the last one."""
        return np.append(np.zeros(len(steps_of(sample)) - 1), sample.reward)

    def _policy_loss(self, samples: Sequence[Sample], advantages: Sequence[np.ndarray], before: Sequence[Tensor]) -> Tensor:
        """arXiv:1707.06347, equation 7, less an entropy bonus; each token weighed by trainer / generator, at most 2."""
        options = self.options.policy
        chosen, entropy = self._logprobs(self.policy, samples)
        current, start, advantage = torch.cat(chosen), torch.cat(list(before)), torch.from_numpy(np.concatenate(advantages))
        generation = torch.from_numpy(np.concatenate([own.generation_logprobs[steps_of(own)] for own in samples])).double()
        ratio = (current - start).exp()
        bounded = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
        gain = torch.minimum(ratio * advantage, bounded * advantage) * (start - generation).exp().clamp(max=2.0)
        return -(gain + self.options.entropy_coefficient * torch.cat(entropy)).mean()

    def _critic_loss(self, samples: Sequence[Sample], returns: Sequence[np.ndarray], told: Sequence[np.ndarray]) -> Tensor:
        """½ max((V - R)², (clip(V, V_old ± c) - R)²) of the values before loss tokens (arXiv:2005.12729)."""
        clip = self.options.value_clip
        value = torch.cat([self.critic.values(own)[steps_of(own) - 1] for own in samples])
        old = torch.from_numpy(np.concatenate([values[steps_of(own) - 1] for own, values in zip(samples, told, strict=True)]))
        target = torch.from_numpy(np.concatenate(returns))
        bounded = torch.minimum(torch.maximum(value, old - clip), old + clip)
        return 0.5 * torch.maximum((value - target) ** 2, (bounded - target) ** 2).mean()

    def _apply(
        self,
        prefix: str,
        loss: Tensor,
        weights: Sequence[Tensor],
        adam: AdamW,
        rate: float,
        found: dict[str, list[float]],
    ) -> None:
        gradients = torch.autograd.grad(loss, weights, materialize_grads=True)
        with torch.no_grad():
            norm = adam.step(gradients, rate)
        for name, value in (("loss", loss.item()), ("grad_norm", norm), ("learning_rate", rate)):
            found[f"{prefix}{name}"].append(value)


def steps_of(sample: Sample) -> np.ndarray:
    """int64 [M]: where its loss tokens are."""
    return np.flatnonzero(sample.loss_mask)
