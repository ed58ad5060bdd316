"""Checks of thousands of sampled tokens against the distributions that they should come from.

Under a right sampler every figure below adds up differences from an expected value, so that its size in standard deviations
is a standard normal number, or nearly so. One of all figures of the kit is suspicious by chance in a few of a hundred suites,
and found wrong by more samples in fewer than one of 10⁸.
"""

from collections import Counter
from math import sqrt

import numpy as np
import pytest
from attrs import define, field

from rlcore.spi import GenerateResult, Provider, SamplingParams, capabilities
from rlcore.spi.arrays import Int32Array, Int64Array
from rlcore.testing.conformance.chance import (
    Limits,
    distance_to_uniform,
    limit_of,
    recurring,
)
from rlcore.testing.conformance.fixtures import require
from rlcore.testing.conformance.generator_fixtures import (
    LONG,
    GeneratorFixtures,
    GeneratorUnderTest,
    Question,
    make_long_question,
    samples_of,
)
from rlcore.testing.conformance.reference import Float64Array, Reference, ReferencePolicy, sampling_distribution

LONGEST_TAIL = 16
MOST_SHOWN = 8
STAGE = 20
"""Tokens of each part of a sample whose surprise is judged by itself."""
LATE = 16
"""Tokens of a sample that the checks of single log-probabilities see; of later ones their mean error is judged."""
FEWEST = 32.0
"""Variance below which a count is too far from normal to be judged."""
CASES = {
    "plain": (SamplingParams(), 20, ()),
    "cool": (SamplingParams(temperature=0.6), 5, ()),
    "top_k_top_p": (SamplingParams(temperature=1.3, top_k=30, top_p=0.95), 5, (capabilities.TOP_K, capabilities.TOP_P)),
}
"""For each name: how tokens are sampled, how many samples each prompt has, and the capabilities that this needs."""


@define
class Excess:
    """How much something happens more often, or is greater, than it should, over many tokens."""

    difference: float = 0.0
    variance: float = 0.0

    def add(self, found: Float64Array, expected: Float64Array, variance: Float64Array) -> None:
        """Some more tokens, [L] each."""
        self.difference += float((found - expected).sum())
        self.variance += float(variance.sum())

    @property
    def deviations(self) -> float:
        """The difference in standard deviations."""
        return self.difference / max(sqrt(self.variance), 1e-9)

    def is_beyond(self, deviations: float) -> bool:
        """Whether it is as far off as a normal number by so many standard deviations, where there is enough to judge by."""
        return self.variance >= FEWEST and abs(self.deviations) > limit_of(deviations, self.variance)


@define
class Evidence:
    """What sampled tokens say about the sampler."""

    vocab_size: int
    surprise: Excess = field(factory=Excess)
    """Log-probability plus entropy: above 0 for a sampler that is cooler than it says."""
    stages: list[Excess] = field(factory=lambda: [Excess() for _ in range(0, LONG, STAGE)])
    """`surprise` of each STAGE tokens in turn: the first of every sample, those after them, and so on."""
    repeats: Excess = field(factory=Excess)
    """Tokens that the prompt or the sample holds already."""
    in_a_row: Excess = field(factory=Excess)
    """Tokens that equal the one before."""
    tails: dict[int, Excess] = field(init=False)
    """The excess of the last tokens of the vocabulary, by how many they are: 1, 2, 4 …"""
    counts: Float64Array = field(init=False)
    """float64 [V]: by how many tokens of each number there are more than expected."""
    variances: Float64Array = field(init=False)
    """float64 [V]: the variances of `counts`."""
    ranks: list[Float64Array] = field(factory=list)
    """The randomised rank of each token in its distribution, in [0, 1), the most probable first: uniform (Rosenblatt, 1952)."""
    late_errors: list[Float64Array] = field(factory=list)
    """How far log-probabilities reported from token LATE on are from those of the distribution."""

    def __attrs_post_init__(self) -> None:
        self.tails = {2**power: Excess() for power in range(LONGEST_TAIL.bit_length()) if 2**power < self.vocab_size}
        self.counts, self.variances = np.zeros(self.vocab_size), np.zeros(self.vocab_size)

    def add(
        self,
        table: Float64Array,
        tokens: Int32Array,
        seen: Float64Array,
        positions: Int64Array,
        reported: Float64Array,
        random: np.random.Generator,
    ) -> None:
        """Some tokens int [L] that were sampled one after the other, at `positions` [L] of their sample, of log-probabilities
        `table` [L, V], those `reported` [L]; `seen` [L, V] is 1.0 at every token that came before."""
        rows, probabilities = np.arange(len(tokens)), np.exp(table)
        finite = np.where(np.isfinite(table), table, 0.0)
        entropy, square = -(probabilities * finite).sum(1), (probabilities * finite**2).sum(1)
        found, variance = finite[rows, tokens], square - entropy**2
        self.surprise.add(found, -entropy, variance)
        for number, excess in enumerate(self.stages):
            own = positions // STAGE == number
            excess.add(found[own], -entropy[own], variance[own])
        self._count(self.repeats, probabilities, seen, tokens)
        last = np.zeros_like(seen)
        last[rows[1:], tokens[:-1]] = 1.0
        self._count(self.in_a_row, probabilities, last, tokens)
        for length, excess in self.tails.items():
            tail = np.zeros_like(seen)
            tail[:, -length:] = 1.0
            self._count(excess, probabilities, tail, tokens)
        self.counts += np.bincount(tokens, minlength=self.vocab_size) - probabilities.sum(0)
        self.variances += (probabilities * (1.0 - probabilities)).sum(0)
        self.late_errors.append(np.abs(table[rows, tokens] - reported)[positions >= LATE])
        own = probabilities[rows, tokens]
        above = np.where(probabilities > own[:, None], probabilities, 0.0).sum(1)
        self.ranks.append(above + own * random.random(len(tokens)))

    def _count(self, excess: Excess, probabilities: Float64Array, members: Float64Array, tokens: Int32Array) -> None:
        mass = np.clip((probabilities * members).sum(1), 0.0, 1.0)
        excess.add(members[np.arange(len(tokens)), tokens], mass, mass * (1.0 - mass))

    def problems(self, limits: Limits) -> dict[str, str]:
        """What is beyond the limits, by the figure's name, the farthest off first."""
        named = {
            "log-probability plus entropy, which is above 0 where the sampler is cooler than it says": self.surprise,
            **{f"the same from token {STAGE * number} on": excess for number, excess in enumerate(self.stages)},
            "tokens that came before in the sample or its prompt": self.repeats,
            "tokens that equal the one before": self.in_a_row,
            **{f"the last {length} of the vocabulary": excess for length, excess in self.tails.items()},
        }
        tokens = {f"token {token}": Excess(*both) for token, both in enumerate(zip(self.counts, self.variances, strict=True))}
        off = [(excess, name) for name, excess in named.items() if excess.is_beyond(limits.deviations)]
        off += [(excess, name) for name, excess in tokens.items() if excess.is_beyond(limits.deviations_of_many)]
        off.sort(key=lambda pair: -abs(pair[0].deviations))
        found = {
            name: f"{name}: off by {excess.difference:+.1f}, {excess.deviations:+.1f} standard deviations"
            for excess, name in off
        }
        gap = distance_to_uniform(np.concatenate(self.ranks))
        if gap > limits.kolmogorov_smirnov:
            name = "frequencies of more and less probable tokens"
            found[name] = f"{name}: Kolmogorov-Smirnov distance times √n is {gap:.2f}"
        return found


class GeneratorDistribution(GeneratorFixtures):
    """What a few samples cannot show: a temperature a few percent off, tokens that never come, penalties nobody asked for."""

    @pytest.mark.parametrize("name", CASES)
    def test_many_tokens_are_those_of_the_distribution(
        self, provider: Provider, generator: GeneratorUnderTest, policy: ReferencePolicy, reference: Reference, name: str
    ) -> None:
        """Their surprise, repetitions and numbers, over whole samples of several prompts."""
        sampling, num_samples, needed = CASES[name]
        for capability in needed:
            require(provider, capability)

        def find(numbers: range, limits: Limits) -> dict[str, str]:
            evidence, random = Evidence(reference.vocab_size), np.random.default_rng(12)
            repeated: dict[str, str] = {}
            for number in numbers:
                question = make_long_question(reference.vocab_size, num_samples, number)
                result = generator.generate(question, 0, sampling)
                gather(evidence, generator.edge, policy, question, result, sampling, random)
                if name == "plain":
                    repeated |= find_repeated_samples(question, result)
            if name == "plain":
                assert_tells_temperatures_apart(evidence)
            off = float(np.concatenate(evidence.late_errors).mean())
            assert off <= generator.tolerance, f"from token {LATE} on log-probabilities are off by {off:.3g} nats on average"
            return evidence.problems(limits) | repeated

        problems = recurring(find)
        assert not problems, "sampled tokens do not come from the model's distribution: " + "; ".join(problems[:MOST_SHOWN])


def assert_tells_temperatures_apart(evidence: Evidence) -> None:
    """Fail unless the evidence of every part of a sample would show a sampler at 0.9 of its temperature, whose surprise is off
    by a ninth of the variance, to first order."""
    shown = min(sqrt(excess.variance) for excess in evidence.stages) / 9
    assert shown >= 5, (
        f"the model is too sure, or too unsure, of its next token: over {STAGE} tokens of each sample, a sampler at 0.9 of its "
        f"temperature would be off by {shown:.1f} standard deviations; expected at least 5. Override the fixtures `model` and "
        "`weights`: make_model takes an initializer_range"
    )


def find_repeated_samples(question: Question, result: GenerateResult) -> dict[str, str]:
    """A problem where a prompt has the same long sample twice, as seeds bring about of which some bits are not read."""
    samples = Counter((index // question.num_samples, sample.tobytes()) for index, sample in enumerate(samples_of(result)))
    num_repeated, name = samples.total() - len(samples), "samples that equal another of their prompt"
    return {name: f"{num_repeated} {name}, though their seeds differ"} if num_repeated else {}


def gather(
    evidence: Evidence,
    edge: float,
    policy: ReferencePolicy,
    question: Question,
    result: GenerateResult,
    sampling: SamplingParams,
    random: np.random.Generator,
) -> None:
    """Add all samples to the evidence; positions at which rounding decides what a truncation keeps are left out."""
    logprobs = np.split(result.logprobs.astype(np.float64), result.offsets[1:-1])
    for index, response in enumerate(samples_of(result)):
        prompt = question.prompts.sequence(index // question.num_samples)
        tokens = np.concatenate([prompt, response])
        table, margin = sampling_distribution(policy.logits(tokens)[len(prompt) - 1 : -1], sampling)
        seen = seen_before(tokens, evidence.vocab_size)[len(prompt) :]
        clear = margin >= edge
        evidence.add(table[clear], response[clear], seen[clear], np.flatnonzero(clear), logprobs[index][clear], random)


def seen_before(tokens: Int32Array, vocab_size: int) -> Float64Array:
    """float64 [L, V]: 1.0 where a token came before position l of a sequence int32 [L]."""
    seen = np.zeros((len(tokens), vocab_size))
    seen[np.arange(1, len(tokens)), tokens[:-1]] = 1.0
    return np.minimum(np.cumsum(seen, axis=0), 1.0)
