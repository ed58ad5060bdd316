"""Checks of thousands of sampled tokens against the distributions that they should come from.

Each figure is a score: a feature of the sampled tokens, less its expectation. Its size in standard deviations is a standard
normal number under a right sampler, or nearly so. Samples are drawn until the effects of `EFFECTS` are found or excluded. A
right sampler fails in fewer than one of 10⁶ suites.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import pytest
from attrs import define, field

from rlcore.spi import GenerateResult, Provider, SamplingParams, capabilities
from rlcore.spi.arrays import Int32Array, Int64Array
from rlcore_conformance.generators.chance import Limits, Score, distance_to_uniform, recurring
from rlcore_conformance.generators.generator_fixtures import (
    LONG,
    GeneratorFixtures,
    GeneratorUnderTest,
    Question,
    make_long_question,
    samples_of,
)
from rlcore_conformance.references.fixtures import require
from rlcore_conformance.references.reference import Float64Array, Reference, ReferencePolicy, sampling_distribution

LONGEST_TAIL = 16
MOST_SHOWN = 8
STAGE = 20
"""Tokens of each part of a sample whose surprise is judged by itself."""
LATE = 16
"""Tokens of a sample that the checks of single log-probabilities see; of later ones their mean error is judged."""
TEMPERATURE = "log-probability plus entropy, which is above 0 where the sampler is cooler than it says"
STAGES = tuple(f"the same from token {first} on" for first in range(0, LONG, STAGE))
PROMPT = "tokens of the prompt"
REPEATS = "tokens that came before in the sample or its prompt"
OCCURRENCES = "how often tokens came before"
IN_A_ROW = "tokens that equal the one before"
RARE: Mapping[str, float] = {f"the least probable tokens, {share:.1%} of the probability": share for share in (0.003, 0.03)}
"""The shares of the probability of tokens that a cut-off takes, such as a top_k, top_p or min_p of the sampler's own."""
EFFECTS: Mapping[str, float] = {
    TEMPERATURE: 0.03,
    **dict.fromkeys(STAGES, 0.1),
    PROMPT: 0.3,
    REPEATS: 0.3,
    OCCURRENCES: 0.1,
    IN_A_ROW: 0.3,
    **dict.fromkeys(RARE, 1.0),
}
"""The smallest effect of each figure that the check finds: a share of the temperature, else nats added to or taken from the
logits of such tokens, for each occurrence where these are counted."""
STOP = "stop tokens"
FIRST_STOP = "stop tokens at the beginning of a sample"
STOP_EFFECTS: Mapping[str, float] = {STOP: 0.3, FIRST_STOP: 1.0}
"""Effect sizes, as in EFFECTS, that the check of stop tokens finds."""
STOP_EACH = 4
"""Each such token of the vocabulary is a stop token, so that samples are short."""
NUM_STOPPED = 16
"""Samples of each prompt that may end with one."""
MOST_BLOCKS = 16
"""Most questions that a check asks."""
CASES = {
    "plain": (SamplingParams(), 20, ()),
    "cool": (SamplingParams(temperature=0.6), 5, ()),
    "top_k_top_p": (SamplingParams(temperature=1.3, top_k=30, top_p=0.95), 5, (capabilities.TOP_K, capabilities.TOP_P)),
}
"""For each name: how tokens are sampled, how many samples each prompt has, and the capabilities that this needs."""


@define
class BiasStatistic:
    """Statistics of sampled tokens against the distributions that they should come from."""

    vocab_size: int
    scores: dict[str, Score] = field(factory=lambda: {name: Score() for name in EFFECTS})
    """The figures that have an effect to find, by name."""
    tails: dict[int, Score] = field(init=False)
    """The score of the last tokens of the vocabulary, by how many they are: 1, 2, 4 …"""
    counts: Float64Array = field(init=False)
    """float64 [V]: by how many tokens of each number there are more than expected."""
    variances: Float64Array = field(init=False)
    """float64 [V]: the variances of `counts`."""
    ranks: list[Float64Array] = field(factory=list)
    """The randomised rank of each token in its distribution, in [0, 1), the most probable first: uniform (Rosenblatt, 1952)."""
    late_errors: list[Float64Array] = field(factory=list)
    """How far log-probabilities reported from token LATE on are from those of the distribution."""

    def __attrs_post_init__(self) -> None:
        self.tails = {2**power: Score() for power in range(LONGEST_TAIL.bit_length()) if 2**power < self.vocab_size}
        self.counts, self.variances = np.zeros(self.vocab_size), np.zeros(self.vocab_size)

    def add(
        self,
        table: Float64Array,
        tokens: Int32Array,
        before: Float64Array,
        prompt: Float64Array,
        positions: Int64Array,
        reported: Float64Array,
        random: np.random.Generator,
    ) -> None:
        """Add tokens int [L] that were sampled one after the other, at `positions` [L] of their sample, of log-probabilities
        `table` [L, V], those `reported` [L]; `before` [L, V] says how often each token came before, `prompt` [V] which tokens
        the prompt holds."""
        rows, probabilities = np.arange(len(tokens)), np.exp(table)

        def add(score: Score, feature: Float64Array, of: Int64Array | slice = slice(None)) -> None:
            mean = (probabilities * feature).sum(1)
            variance = np.maximum((probabilities * feature**2).sum(1) - mean**2, 0.0)
            score.add(feature[rows, tokens][of], mean[of], variance[of])

        finite = np.where(np.isfinite(table), table, 0.0)
        add(self.scores[TEMPERATURE], finite)
        for number, name in enumerate(STAGES):
            add(self.scores[name], finite, np.flatnonzero(positions // STAGE == number))
        add(self.scores[PROMPT], np.broadcast_to(prompt, table.shape))
        add(self.scores[REPEATS], (before > 0).astype(np.float64))
        add(self.scores[OCCURRENCES], before)
        last = np.zeros_like(before)
        last[rows[1:], tokens[:-1]] = 1.0
        add(self.scores[IN_A_ROW], last)
        for length, score in self.tails.items():
            tail = np.zeros_like(before)
            tail[:, -length:] = 1.0
            add(score, tail)
        self.counts += np.bincount(tokens, minlength=self.vocab_size) - probabilities.sum(0)
        self.variances += (probabilities * (1.0 - probabilities)).sum(0)
        self.late_errors.append(np.abs(table[rows, tokens] - reported)[positions >= LATE])
        own = probabilities[rows, tokens]
        above = np.where(probabilities > own[:, None], probabilities, 0.0).sum(1)
        ranks = above + own * random.random(len(tokens))
        for name, share in RARE.items():
            self.scores[name].add((ranks > 1.0 - share) * 1.0, np.array(share), np.full(len(ranks), share * (1.0 - share)))
        self.ranks.append(ranks)

    def join(self, other: "BiasStatistic") -> None:
        """Add the tokens of other evidence."""
        for name, score in self.scores.items():
            score.join(other.scores[name])
        for length, score in self.tails.items():
            score.join(other.tails[length])
        self.counts += other.counts
        self.variances += other.variances
        self.ranks += other.ranks
        self.late_errors += other.late_errors

    def problems(self, limits: Limits) -> dict[str, str]:
        """The statistics beyond the limits, by name, the farthest off first."""
        named = {**self.scores, **{f"the last {length} of the vocabulary": score for length, score in self.tails.items()}}
        tokens = {f"token {token}": Score(*both) for token, both in enumerate(zip(self.counts, self.variances, strict=True))}
        off = [(score, name) for name, score in named.items() if score.is_beyond(limits.deviations)]
        off += [(score, name) for name, score in tokens.items() if score.is_beyond(limits.deviations_of_many)]
        off.sort(key=lambda pair: -abs(pair[0].deviations))
        found = {name: described(name, score) for score, name in off}
        gap = distance_to_uniform(np.concatenate(self.ranks))
        if gap > limits.kolmogorov_smirnov:
            name = "frequencies of more and less probable tokens"
            found[name] = f"{name}: Kolmogorov-Smirnov distance times √n is {gap:.2f}"
        return found


def described(name: str, score: Score) -> str:
    """Return a line that describes a score."""
    return (
        f"{name}: off by {score.difference:+.1f}, {score.deviations:+.1f} standard deviations, an effect of {score.effect:+.3f}"
    )


def found_effects(draw: Callable[[int], Mapping[str, Score]], effects: Mapping[str, float]) -> list[str]:
    """Return a line for each figure with an effect. Questions are asked until all `effects` are found or excluded.

    AssertionError where MOST_BLOCKS questions do not tell.
    """
    scores = {name: Score() for name in effects}
    for number in range(MOST_BLOCKS):
        for name, score in draw(number).items():
            scores[name].join(score)
        verdicts = {name: scores[name].verdict(effect) for name, effect in effects.items()}
        if "found" in verdicts.values() or "open" not in verdicts.values():
            return [described(name, scores[name]) for name, verdict in verdicts.items() if verdict == "found"]
    unclear = "; ".join(f"{name} (an effect of {effects[name]:g})" for name, verdict in verdicts.items() if verdict == "open")
    raise AssertionError(
        f"the model is too sure, or too unsure, of its next token: {MOST_BLOCKS} questions neither show nor "
        f"exclude {unclear}. Override the fixtures `model` and `weights`: make_model takes an initializer_range"
    )


class GeneratorDistribution(GeneratorFixtures):
    """Checks of many samples: a temperature a few percent off, tokens that never come, penalties nobody asked for."""

    @pytest.mark.parametrize("name", CASES)
    def test_many_tokens_are_those_of_the_distribution(
        self, provider: Provider, generator: GeneratorUnderTest, policy: ReferencePolicy, reference: Reference, name: str
    ) -> None:
        """Finds a temperature that is 3% off, a penalty of 0.3 nats on repeated tokens or those of the prompt, one of 0.1 nats
        for each occurrence, a cut-off of 0.3% of the probability, and tokens that never come, in more than 99 of 100 samplers
        that have them."""
        sampling, num_samples, needed = CASES[name]
        for capability in needed:
            require(provider, capability)
        random = np.random.default_rng(12)
        repeated: dict[str, str] = {}

        @cache
        def draw(number: int) -> BiasStatistic:
            evidence = BiasStatistic(reference.vocab_size)
            question = make_long_question(reference.vocab_size, num_samples, number)
            result = generator.generate(question, 0, sampling)
            gather(evidence, generator.edge, policy, question, result, sampling, random)
            if name == "plain":
                repeated.update(find_repeated_samples(question, result))
            off = float(np.concatenate(evidence.late_errors).mean())
            assert off <= generator.tolerance, f"from token {LATE} on log-probabilities are off by {off:.3g} nats on average"
            return evidence

        def find(numbers: range, limits: Limits) -> dict[str, str]:
            evidence = BiasStatistic(reference.vocab_size)
            for number in numbers:
                evidence.join(draw(number))
            return evidence.problems(limits) | repeated

        problems = recurring(find) or found_effects(lambda number: draw(number).scores, EFFECTS)
        assert not problems, "sampled tokens do not come from the model's distribution: " + "; ".join(problems[:MOST_SHOWN])

    def test_stop_tokens_are_sampled_as_often_as_the_model_says(
        self, generator: GeneratorUnderTest, policy: ReferencePolicy, reference: Reference
    ) -> None:
        """Finds a penalty or bonus of 0.3 nats on stop tokens, and one of 1 nat at the first token of a sample, as by a least
        number of tokens of the sampler's own, in more than 99 of 100 samplers that have them."""
        stops = tuple(range(0, reference.vocab_size, STOP_EACH))
        sampling = SamplingParams(stop_token_ids=stops)

        def draw(number: int) -> dict[str, Score]:
            scores = {name: Score() for name in STOP_EFFECTS}
            question = make_long_question(reference.vocab_size, NUM_STOPPED, number)
            for index, response in enumerate(samples_of(generator.generate(question, 0, sampling))):
                prompt = question.prompts.sequence(index // NUM_STOPPED)
                logits = policy.logits(np.concatenate([prompt, response]))[len(prompt) - 1 : -1]
                share = np.exp(sampling_distribution(logits, sampling)[0])[:, stops].sum(1)
                found = np.isin(response, stops).astype(np.float64)
                scores[STOP].add(found, share, share * (1.0 - share))
                scores[FIRST_STOP].add(found[:1], share[:1], share[:1] * (1.0 - share[:1]))
            return scores

        problems = found_effects(draw, STOP_EFFECTS)
        assert not problems, "stop tokens do not come from the model's distribution: " + "; ".join(problems)


def find_repeated_samples(question: Question, result: GenerateResult) -> dict[str, str]:
    """A problem where a prompt has the same long sample twice, as seeds bring about of which some bits are not read."""
    samples = Counter((index // question.num_samples, sample.tobytes()) for index, sample in enumerate(samples_of(result)))
    num_repeated, name = samples.total() - len(samples), "samples that equal another of their prompt"
    return {name: f"{num_repeated} {name}, though their seeds differ"} if num_repeated else {}


def gather(
    evidence: BiasStatistic,
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
        before = occurrences_before(tokens, evidence.vocab_size)[len(prompt) :]
        of_prompt = np.minimum(np.bincount(prompt, minlength=evidence.vocab_size), 1.0)
        clear = margin >= edge
        positions = np.flatnonzero(clear)
        evidence.add(table[clear], response[clear], before[clear], of_prompt, positions, logprobs[index][clear], random)


def occurrences_before(tokens: Int32Array, vocab_size: int) -> Float64Array:
    """Return float64 [L, V]: how often each token occurs before each position of a sequence int32 [L]."""
    before = np.zeros((len(tokens), vocab_size))
    before[np.arange(1, len(tokens)), tokens[:-1]] = 1.0
    return np.cumsum(before, axis=0)
