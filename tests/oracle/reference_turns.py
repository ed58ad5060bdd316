"""GRPO and PPO of episodes with several turns, in float64: what each turn earned, and which samples count."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from .recorded import Sample
from .reference_grpo import AdamW, Options, TokenInputs, advantages, learning_rate, minibatch_groups, token_terms
from .reference_ppo import PpoOptions, PpoRun, steps_of
from .reference_run import Policy

Spans = list[tuple[int, int]]


def turns_of(sample: Sample) -> Spans:
    """Where its turns begin and end: something is read before each."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.weight_versions >= 0, [0]]))).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


class Judge:
    """What turns earn, by what they say."""

    def __init__(self, model: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)

    def texts(self, sample: Sample) -> list[str]:
        return [self.tokenizer.decode(sample.tokens[start:end], skip_special_tokens=True) for start, end in turns_of(sample)]

    def rewards(self, sample: Sample) -> list[float]:
        return [(text.count("1") - text.count("2")) / 4 for text in self.texts(sample)]

    def is_cut(self, sample: Sample) -> bool:
        """Whether a limit of tokens or turns ended it."""
        return sample.is_cut or self.texts(sample)[-1][:1] not in "012345"


class GrpoOfTurns:
    """Runs once; `policy` then has the last weights. A turn is compared with those of its number in its group, by what was
    earned from it on; samples that were cut off count in nothing."""

    def __init__(self, model: Path, options: Options) -> None:
        self.options, self.judge = options, Judge(model)
        self.policy = Policy(model, options.temperature)
        self.weights = list(self.policy.model.parameters())
        with torch.no_grad():
            self.adam = AdamW([weight.detach() for weight in self.weights], options)
        self.of_version = [self._copied()]

    def _copied(self) -> list[Tensor]:
        return [weight.detach().clone() for weight in self.weights]

    def advantages(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """float64 [L] of each sample, 0 outside its turns."""
        found = [np.zeros(len(own.tokens)) for own in samples]
        counted = [index for index, own in enumerate(samples) if not self.judge.is_cut(own)]
        earned = {index: self.judge.rewards(samples[index]) for index in counted}
        for turn in range(max(map(len, earned.values()))):
            having = [index for index in counted if len(earned[index]) > turn]
            to_go = [sum(earned[index][turn:]) for index in having]
            values = advantages(to_go, [samples[index].group for index in having], self.options.advantage_epsilon)
            for index, value in zip(having, values, strict=True):
                start, end = turns_of(samples[index])[turn]
                found[index][start:end] = value
        return found

    def step(self, number: int, samples: Sequence[Sample]) -> Mapping[str, float]:
        """A step, counted from 1; its loss, the norm of its gradient and how many updates it makes."""
        options = self.options
        values = self.advantages(samples)
        with torch.no_grad():
            at_start = [_said(own, whole) for own, whole in zip(samples, self.policy.distributions(samples), strict=True)]
        losses, norms = [], []
        for place, groups in enumerate(minibatch_groups(len({own.group for own in samples}), number, options)):
            members = [index for index, own in enumerate(samples) if own.group in groups and own.loss_mask.any()]
            if not any(values[index].any() for index in members):
                continue
            terms = []
            for index, whole in zip(members, self.policy.distributions([samples[index] for index in members]), strict=True):
                mask = samples[index].loss_mask
                for one in set(values[index][mask].tolist()):  # each turn's tokens
                    chosen = torch.from_numpy(values[index][mask] == one)
                    terms.append(
                        token_terms(
                            TokenInputs(
                                current=_said(samples[index], whole)[chosen],
                                generation=torch.from_numpy(samples[index].generation_logprobs[mask]).double()[chosen],
                                at_step_start=at_start[index][chosen],
                                reference=None,
                                entropy=torch.zeros(0),
                                advantage=one,
                                is_present=chosen,
                            ),
                            options,
                        ).loss
                    )
            loss = torch.cat(terms).mean()
            gradients = torch.autograd.grad(loss, self.weights)
            rate = learning_rate((number - 1) * options.minibatches_per_step + place, options)
            with torch.no_grad():
                norms.append(self.adam.step(gradients, rate))
            losses.append(loss.item())
            self.of_version.append(self._copied())
        return {"loss": float(np.mean(losses)), "grad_norm": float(np.mean(norms)), "updates": len(losses)}

    def distance(self, samples: Sequence[Sample]) -> float:
        """Nats by which the recorded log-probabilities are at most off those of the weights that they name."""
        present, worst = self._copied(), 0.0
        with torch.no_grad():
            for version in {int(one) for own in samples for one in own.weight_versions[own.loss_mask]}:
                for weight, value in zip(self.weights, self.of_version[version], strict=True):
                    weight.copy_(value)
                for own, whole in zip(samples, self.policy.distributions(samples), strict=True):
                    is_own = (own.weight_versions == version)[own.loss_mask]
                    off = np.abs(_said(own, whole).numpy() - own.generation_logprobs[own.loss_mask])[is_own]
                    worst = max(worst, float(off.max(initial=0.0)))
            for weight, value in zip(self.weights, present, strict=True):
                weight.copy_(value)
        return worst


REWARD = '''
def score(completion):
    """A reward behind each 1 and 2, and one at the end."""
    earned = {"1": 0.5, "2": -0.25}
    parts = {place: earned[letter] for place, letter in enumerate(completion, start=1) if letter in earned}
    return {"reward": completion.count("3") / 4, "part_rewards": parts}
'''


class Parts:
    """The rewards of an answer's parts: a 1 or a 2 ends one, and the end another."""

    def __init__(self, model: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)

    def of(self, sample: Sample) -> list[tuple[int, int, float]]:
        """The first and the end token of each part, and its reward; the last part has a token."""
        ((first, end),) = turns_of(sample)
        letters = [self.tokenizer.decode([token], skip_special_tokens=True) for token in sample.tokens[first:end].tolist()]
        found, start, last = [], 0, letters.count("3") / 4
        for place, letter in enumerate(letters, start=1):
            if letter not in ("1", "2"):
                continue
            reward = 0.5 if letter == "1" else -0.25
            if place == len(letters):
                last += reward
            else:
                found.append((first + start, first + place, reward))
                start = place
        return [*found, (first + start, end, last)]


class GrpoOfParts(GrpoOfTurns):
    """A token's advantage is the sum of what its part and those behind it earn, each less the mean of all parts' rewards in the
    group and divided by their deviation (arXiv:2402.03300, section 4.1.3)."""

    def __init__(self, model: Path, options: Options) -> None:
        super().__init__(model, options)
        self.parts = Parts(model)

    def advantages(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        found = [np.zeros(len(own.tokens)) for own in samples]
        for group in {own.group for own in samples}:
            members = [index for index, own in enumerate(samples) if own.group == group]
            parts = {index: self.parts.of(samples[index]) for index in members}
            rewards = [reward for index in members for _, _, reward in parts[index]]
            mean, deviation = np.mean(rewards), np.std(rewards, ddof=1) if len(rewards) > 1 else 0.0
            for index in members:
                for start, end, _ in parts[index]:
                    to_go = [reward - mean for begin, _, reward in parts[index] if begin >= start]
                    found[index][start:end] = sum(to_go) / (deviation + self.options.advantage_epsilon)
        return found


class PpoOfParts(PpoRun):
    """A part's reward is earned by its last token."""

    def __init__(self, model: Path, options: PpoOptions) -> None:
        super().__init__(model, options)
        self.parts = Parts(model)

    def _earned(self, sample: Sample) -> np.ndarray:
        earned = np.zeros(len(sample.tokens))
        for _, end, reward in self.parts.of(sample):
            earned[end - 1] += reward
        return earned[steps_of(sample)]


class PpoOfTurns(PpoRun):
    """A turn's reward is earned by its last token."""

    def __init__(self, model: Path, options: PpoOptions) -> None:
        super().__init__(model, options)
        self.judge = Judge(model)

    def _earned(self, sample: Sample) -> np.ndarray:
        earned = np.zeros(len(sample.tokens))
        for (_, end), reward in zip(turns_of(sample), self.judge.rewards(sample), strict=True):
            earned[end - 1] = reward
        return earned[steps_of(sample)]


def _said(sample: Sample, distributions: Tensor) -> Tensor:
    """Log-probabilities of the sample's loss tokens."""
    mask = torch.from_numpy(sample.loss_mask)
    return distributions[mask].gather(1, torch.from_numpy(sample.tokens)[mask][:, None])[:, 0]
