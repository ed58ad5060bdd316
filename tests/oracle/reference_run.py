"""A whole run once more in float64: from the initial weights and the samples that the run recorded to its last weights.

The policy is transformers' own model. Sequences are neither packed nor padded: those of one length go through it side by side.
What a step's updates read (advantages, minibatches, counts, log-probabilities at the start of the step and of the reference)
comes from the samples and these weights, not from what the trainer was given.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from .recorded import Sample
from .reference_grpo import (
    MIN_COMPARED,
    AdamW,
    Options,
    TokenInputs,
    advantages,
    agreement,
    figures,
    learning_rate,
    minibatch_groups,
    token_terms,
)


class Policy:
    """Log-probabilities of tokens under a model of float64 weights."""

    def __init__(self, directory: Path, temperature: float) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
        for module in self.model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = rms_norm(module)  # transformers' computes in float32 whatever it is given
        self.temperature = temperature

    def distributions(self, samples: Sequence[Sample]) -> list[Tensor]:
        """float64 [L, V] of each: log-probabilities of all tokens at each place, given those before; zeros at the first."""
        found: dict[int, Tensor] = {}
        for length in {len(own.tokens) for own in samples}:
            members = [index for index, own in enumerate(samples) if len(own.tokens) == length]
            tokens = torch.from_numpy(np.stack([samples[index].tokens for index in members]))
            logits = self.model(input_ids=tokens, use_cache=False).logits[:, :-1] / self.temperature
            found |= zip(members, nn.functional.pad(logits.log_softmax(-1), (0, 0, 1, 0)), strict=True)
        return [found[index] for index in range(len(samples))]

    def weights(self) -> dict[str, Tensor]:
        """By name; tied ones once."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}


@frozen(kw_only=True, eq=False)
class ExpectedSample:
    """What is right for a sample throughout its step; tensors are float64 [L]."""

    sample: Sample
    advantage: float
    at_step_start: Tensor
    generation: Tensor
    """What the loss takes for the generator's: as recorded, or where tokens are too old the trainer's, at the step's start."""
    drawn_from: Tensor
    """Log-probabilities in the distribution that the sampler draws from: at each token that of the weights which it names, cut
    by top-p and renormalised."""
    mirrored: Tensor | None
    """The same where the versions of the sample's tokens are exchanged, the oldest for the newest; None where it has one."""
    reference: Tensor
    kept: Tensor
    """bool [L, V]: what the trainer normalises over."""


@frozen(kw_only=True, eq=False)
class ExpectedUpdate:
    """What an update has to come to."""

    samples: list[ExpectedSample]
    is_first: bool
    """Of its step."""
    figures: Mapping[str, float]
    compared: Mapping[str, float]
    """How far trainer and generator agree, where the driver computes it, since some samples are of older weights."""


@frozen(kw_only=True, eq=False)
class ExpectedStep:
    """A step's samples and its updates."""

    weight_version: int
    """Before its updates."""
    oldest_version: int
    """Of which a token may be."""
    samples: list[ExpectedSample]
    updates: list[ExpectedUpdate]

    @property
    def is_stale(self) -> bool:
        """Whether a token of it is of older weights."""
        return any((own.sample.weight_versions[own.sample.loss_mask] < self.weight_version).any() for own in self.samples)


class ReferenceRun:
    """Runs once; `weights` are then the last ones."""

    def __init__(self, model: Path, options: Options) -> None:
        self.options = options
        self.policy, self.reference, self._past = (Policy(model, options.temperature) for _ in range(3))
        self.parameters = list(self.policy.model.parameters())
        with torch.no_grad():
            self.optimizer = AdamW([parameter.detach() for parameter in self.parameters], options)
        self._of_version: list[list[Tensor]] = []
        """The weights of each version, in the order of the parameters."""
        self._of_step: list[int] = []
        """The version that each step began with."""
        self._keep_version()

    @property
    def weights(self) -> dict[str, Tensor]:
        """float64, by their names in Hugging Face's files."""
        return self.policy.weights()

    def steps(self, samples: Sequence[Sequence[Sample]]) -> list[ExpectedStep]:
        """All steps, given the samples of each."""
        return [self._step(number, own) for number, own in enumerate(samples, start=1)]

    def _step(self, number: int, samples: Sequence[Sample]) -> ExpectedStep:
        options, version = self.options, self.optimizer.count
        self._of_step.append(version)
        oldest = self._of_step[max(0, number - 1 - options.max_staleness)]
        values = advantages([own.reward for own in samples], [own.group for own in samples], options.advantage_epsilon)
        expected = self._expected(samples, values, oldest)
        updates: list[ExpectedUpdate] = []
        step = ExpectedStep(weight_version=version, oldest_version=oldest, samples=expected, updates=updates)
        # Where nothing pulls, AdamW would still move the weights by its moments: such an update is left out.
        pulls = [bool(value) or options.kl_coefficient > 0 for value in values]
        if any(values) or options.kl_coefficient:
            for place, groups in enumerate(minibatch_groups(len({own.group for own in samples}), number, options)):
                members = [index for index, own in enumerate(samples) if own.group in groups]
                if not any(pulls[index] for index in members):
                    continue
                rate = learning_rate((number - 1) * options.updates_per_step + place, options)
                chosen = [expected[index] for index in members]
                updates.append(self._update(chosen, rate, is_first=not updates, is_stale=step.is_stale))
        return step

    def _expected(self, samples: Sequence[Sample], values: Sequence[float], oldest: int) -> list[ExpectedSample]:
        """`oldest` is the version of which tokens may be without being rescored."""
        with torch.no_grad():
            policy, reference = self.policy.distributions(samples), self.reference.distributions(samples)
            kept = [torch.ones(own.shape, dtype=torch.bool) for own in policy]
            drawn_from = self._drawn_from(samples, [own.weight_versions for own in samples], kept)
            mirrored = self._drawn_from(samples, [_mirrored(own) for own in samples])
        expected = []
        for own, value, whole, drawn, other, initial, allowed in zip(
            samples, values, policy, drawn_from, mirrored, reference, kept, strict=True
        ):
            at_step_start = _of(_within(whole, allowed), own.tokens)
            is_too_old = torch.from_numpy(own.loss_mask & (own.weight_versions < oldest)) & self.options.rescores
            expected.append(
                ExpectedSample(
                    sample=own,
                    advantage=value,
                    at_step_start=at_step_start,
                    generation=torch.where(is_too_old, at_step_start, torch.from_numpy(own.generation_logprobs).double()),
                    drawn_from=drawn,
                    mirrored=other if len(set(own.weight_versions[own.loss_mask].tolist())) > 1 else None,
                    reference=_of(_within(initial, allowed), own.tokens),
                    kept=allowed,
                )
            )
        return expected

    def _drawn_from(
        self, samples: Sequence[Sample], versions: Sequence[NDArray[np.int64]], kept: list[Tensor] | None = None
    ) -> list[Tensor]:
        """Log-probabilities of the samples' tokens, each in the distribution of the version that is given for it. Where
        trainers normalise over that, `kept` is changed to what is left of it."""
        found = [torch.zeros(len(own.tokens), dtype=torch.float64) for own in samples]
        for version in sorted({int(one) for own in versions for one in own if one >= 0}):
            for parameter, weights in zip(self._past.model.parameters(), self._of_version[version], strict=True):
                parameter.copy_(weights)
            said = [index for index, own in enumerate(versions) if (own == version).any()]
            for index, whole in zip(said, self._past.distributions([samples[index] for index in said]), strict=True):
                mask, is_own = _nucleus(whole, self.options.top_p).isfinite(), torch.from_numpy(versions[index] == version)
                own = _of(_within(whole, mask), samples[index].tokens)
                found[index] = torch.where(is_own, own, found[index])
                if kept is not None and self.options.masked:
                    kept[index] &= ~is_own[:, None] | mask
        return found

    def _keep_version(self) -> None:
        self._of_version.append([parameter.detach().clone() for parameter in self.parameters])

    def _update(self, samples: list[ExpectedSample], rate: float, *, is_first: bool, is_stale: bool) -> ExpectedUpdate:
        version = self.optimizer.count
        distributions = self.policy.distributions([own.sample for own in samples])
        inputs = [self._inputs(own, whole, version) for own, whole in zip(samples, distributions, strict=True)]
        terms = [token_terms(own, self.options) for own in inputs]
        if self.options.loss_normalisation == "token":
            loss = torch.cat([own.loss for own in terms]).mean()
        else:
            loss = torch.stack([own.loss.mean() for own in terms]).mean()
        gradients = torch.autograd.grad(loss, self.parameters)
        with torch.no_grad():
            norm = self.optimizer.step(gradients, rate)
            self._keep_version()
        found = {"loss": loss.item(), "grad_norm": norm, "learning_rate": rate, **figures(inputs, terms, self.options)}
        num_present = sum(int(own.is_present.sum()) for own in inputs)
        compared: dict[str, float] = {}
        is_compared = is_first and (self.options.top_p == 1.0 or self.options.masked)
        if is_compared and not is_stale:
            found |= agreement(inputs)
        elif is_compared and num_present >= MIN_COMPARED:
            compared = {**agreement(inputs), "async/tokens_compared": num_present}
        return ExpectedUpdate(samples=samples, is_first=is_first, figures=found, compared=compared)

    def _inputs(self, expected: ExpectedSample, distribution: Tensor, version: int) -> TokenInputs:
        sample = expected.sample
        mask = torch.from_numpy(sample.loss_mask)
        distribution = _within(distribution, expected.kept)
        entropy = -(distribution.detach().exp() * distribution.detach()).sum(-1)
        return TokenInputs(
            current=_of(distribution, sample.tokens)[mask],
            generation=expected.generation[mask],
            at_step_start=expected.at_step_start[mask],
            reference=expected.reference[mask] if self.options.kl_coefficient else None,
            entropy=entropy[mask],
            advantage=expected.advantage,
            is_present=torch.from_numpy(sample.weight_versions == version)[mask],
        )


def rms_norm(module: nn.Module) -> object:
    def forward(hidden: Tensor) -> Tensor:
        return module.weight * (hidden * (hidden.square().mean(-1, keepdim=True) + module.variance_epsilon).rsqrt())

    return forward


def _mirrored(sample: Sample) -> NDArray[np.int64]:
    versions = sample.weight_versions
    said = versions[sample.loss_mask]
    return np.where(sample.loss_mask, said.min() + said.max() - versions, versions)


def _of(distributions: Tensor, tokens: NDArray[np.int64]) -> Tensor:
    return distributions.gather(1, torch.from_numpy(tokens)[:, None])[:, 0]


def _within(distributions: Tensor, kept: Tensor) -> Tensor:
    """Log-probabilities [L, V] over what was kept, bool [L, V]; so low elsewhere that the probability is 0."""
    return distributions.masked_fill(~kept, -1e12).log_softmax(-1)


def _nucleus(distributions: Tensor, top_p: float) -> Tensor:
    """Log-probabilities [L, V] within the smallest set of tokens whose probability reaches `top_p`; -inf outside."""
    ordered, tokens = distributions.exp().sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    kept = torch.where(before < top_p, ordered, 0.0)
    return torch.zeros_like(kept).scatter(1, tokens, kept / kept.sum(-1, keepdim=True)).log()
