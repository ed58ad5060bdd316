"""Checks of what a generator samples: from which distribution, with which seed, and where it stops."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import FinishReason, RaggedTokens, SamplingParams, capabilities
from rlcore.spi.arrays import Int32Array
from rlcore_conformance.generators.chance import Limits, distance_to_uniform, limit_of, recurring
from rlcore_conformance.generators.generator_fixtures import (
    LONG,
    MAX_SEQUENCE_LENGTH,
    PLAIN,
    GeneratorFixtures,
    GeneratorUnderTest,
    Question,
    assert_same_samples,
    logprob_errors,
    make_long_question,
    make_question,
    samples_of,
)
from rlcore_conformance.references.reference import Float64Array, Reference, ReferencePolicy, sampling_distribution

SAMPLINGS = {
    "plain": (SamplingParams(), ()),
    "cool": (SamplingParams(temperature=0.6), ()),
    "hot": (SamplingParams(temperature=1.7), ()),
    "greedy": (SamplingParams(temperature=0.0), ()),
    "top_k": (SamplingParams(temperature=0.8, top_k=3), (capabilities.TOP_K,)),
    "top_k_1": (SamplingParams(top_k=1), (capabilities.TOP_K,)),
    "top_p": (SamplingParams(temperature=1.3, top_p=0.7), (capabilities.TOP_P,)),
    "top_p_alone": (SamplingParams(top_p=0.7), (capabilities.TOP_P,)),
    "top_k_top_p": (SamplingParams(temperature=1.3, top_k=5, top_p=0.8), (capabilities.TOP_K, capabilities.TOP_P)),
}
GREEDY = SamplingParams(temperature=0.0)
NUM_DRAWS = 300


class GeneratorSampling(GeneratorFixtures):
    """Samples are judged by the reference's distributions."""

    @pytest.mark.parametrize("name", SAMPLINGS)
    def test_logprobs_are_those_of_the_distribution_sampled_from(
        self, generator: GeneratorUnderTest, policy: ReferencePolicy, question: Question, name: str
    ) -> None:
        """Each prompt's samples are its own and in order, whatever the lengths of the prompts around it."""
        sampling, needed = SAMPLINGS[name]
        for capability in needed:
            generator.require(capability)
        generator.assert_logprobs(policy, question, generator.generate(question, 0, sampling), sampling)

    def test_exact_logprobs(self, generator: GeneratorUnderTest, policy: ReferencePolicy, question: Question) -> None:
        """Within 1e-4 of a plain forward pass."""
        generator.require(capabilities.EXACT_LOGPROBS)
        errors = logprob_errors(policy, question, generator.generate(question))
        assert errors.max() <= 1e-4, f"log-probabilities are off by up to {errors.max():.3g} nats"

    def test_conversations_change_no_sample(self, generator: GeneratorUnderTest, question: Question) -> None:
        """They say where what is known of a prompt may be found, and nothing else."""
        generator.require(capabilities.PER_SAMPLE_SEEDS)
        request = question.request(PLAIN, 0)
        talks = np.arange(len(question.seeds), dtype=np.int64) // 3 - 1
        expected, found = (generator.handle.generate(evolve(request, conversations=one)) for one in (None, talks))
        assert_same_samples(found, expected, range(len(question.seeds)), generator.tolerance)

    def test_greedy_takes_the_most_probable_token(
        self, generator: GeneratorUnderTest, policy: ReferencePolicy, question: Question
    ) -> None:
        """Greedy sampling takes the most probable token, whatever the seed."""
        result = generator.generate(question, 0, GREEDY)
        for index, response in enumerate(samples_of(result)):
            prompt = question.prompts.sequence(index // question.num_samples)
            logits = policy.logits(np.concatenate([prompt, response]))[len(prompt) - 1 : -1]
            ranked = np.sort(logits, axis=1)
            clear = ranked[:, -1] - ranked[:, -2] > max(1e-3, 2 * generator.tolerance)
            assert (response == logits.argmax(axis=1))[clear].all(), f"sample {index} is not the most probable one"

    @pytest.mark.parametrize("name", ["plain", "top_k_top_p"])
    def test_frequencies_are_those_of_the_distribution(
        self, generator: GeneratorUnderTest, policy: ReferencePolicy, reference: Reference, name: str
    ) -> None:
        """First and second tokens depend on each other through the model alone, and not on a neighbouring seed.

        The tokens' probability integral transform, randomised within each one's probability, is uniform (Rosenblatt, 1952),
        whether they are taken in the order of their numbers or of their probabilities.
        """
        sampling, needed = SAMPLINGS[name]
        for capability in needed:
            generator.require(capability)
        prompt = undecided_prompt(policy, reference.vocab_size, sampling)

        def find(numbers: range, limits: Limits) -> dict[str, str]:
            num_draws = NUM_DRAWS * len(numbers)
            question = Question(
                prompts=RaggedTokens.from_lists([prompt.tolist()]),
                num_samples=num_draws,
                seeds=np.arange(num_draws, dtype=np.int64) + NUM_DRAWS * numbers[0],
                max_tokens=np.full(num_draws, 2, np.int32),
            )
            tokens = np.stack(samples_of(generator.generate(question, 0, sampling)))
            return frequency_problems(limits, tokens, *transformed(policy, prompt, tokens, sampling))

        problems = recurring(find)
        assert not problems, "; ".join(problems)

    def test_same_seeds_give_the_same_samples(self, generator: GeneratorUnderTest, question: Question) -> None:
        """Equal seeds give equal samples, and other seeds give others."""
        generator.require(capabilities.PER_SAMPLE_SEEDS)
        order = range(len(question.seeds))
        first = generator.generate(question)
        assert_same_samples(generator.generate(question), first, order, generator.tolerance)
        other = generator.generate(evolve(question, seeds=question.seeds + 1))
        assert any(one.tolist() != two.tolist() for one, two in zip(samples_of(first), samples_of(other), strict=True)), (
            "all seeds give the same samples"
        )

    def test_a_sample_does_not_depend_on_the_batch_around_it(self, generator: GeneratorUnderTest, question: Question) -> None:
        """Ungrouped, reversed, in part and alone, each prompt with its seed and limit gives the same sample."""
        generator.require(capabilities.PER_SAMPLE_SEEDS)
        expected = generator.generate(question)
        everything = list(range(len(question.seeds)))
        for order in (everything, everything[::-1], [7, 2, 3], [4]):
            found = generator.generate(question.ungrouped(order))
            assert_same_samples(found, expected, order, generator.tolerance)

    def test_a_limit_cuts_exactly_and_is_called_one(
        self, generator: GeneratorUnderTest, reference: Reference, question: Question
    ) -> None:
        """Without stop tokens every sample is as long as its own max_tokens, the model's end-of-text token included."""
        for asked in (question, make_long_question(reference.vocab_size, 2)):
            result = generator.generate(asked)
            assert np.diff(result.offsets).tolist() == asked.max_tokens.tolist()
            assert (result.finish_reasons == FinishReason.LENGTH).all()

    def test_the_sequence_limit_cuts(self, generator: GeneratorUnderTest, reference: Reference) -> None:
        """Prompt and response together hold at most max_sequence_length tokens."""
        random = np.random.default_rng(8)
        lengths = (MAX_SEQUENCE_LENGTH - 5, 10, MAX_SEQUENCE_LENGTH - 1)
        question = Question(
            prompts=RaggedTokens.from_lists([random.integers(0, reference.vocab_size, n).tolist() for n in lengths]),
            num_samples=1,
            seeds=np.arange(3, dtype=np.int64),
            max_tokens=np.full(3, 8, np.int32),
        )
        result = generator.generate(question)
        assert np.diff(result.offsets).tolist() == [5, 8, 1]
        assert (result.finish_reasons == FinishReason.LENGTH).all()

    def test_stop_tokens_end_a_sample(
        self, generator: GeneratorUnderTest, policy: ReferencePolicy, reference: Reference
    ) -> None:
        """The first of them is the last token, even at the limit; a sample without one is cut, not finished."""
        # Enough of both kinds, whatever is sampled, and then samples that end late.
        for question, apart in ((make_question(reference.vocab_size, 8), 7), (make_long_question(reference.vocab_size, 2), 40)):
            stops = tuple(range(0, reference.vocab_size, apart))
            sampling = SamplingParams(stop_token_ids=stops)
            result = generator.generate(question, 0, sampling)
            for sample, reason, limit in zip(samples_of(result), result.finish_reasons, question.max_tokens, strict=True):
                is_stop = np.isin(sample, stops)
                assert not is_stop[:-1].any(), f"a sample goes on after a stop token: {sample.tolist()}"
                assert reason == (FinishReason.STOP if is_stop[-1] else FinishReason.LENGTH)
                assert is_stop[-1] or len(sample) == limit
            reasons = set(result.finish_reasons.tolist())
            assert apart > 7 or reasons == {FinishReason.STOP, FinishReason.LENGTH}, "the batch does not hold both kinds"
            generator.assert_logprobs(policy, question, result, sampling)
        all_stop = generator.generate(question, 0, SamplingParams(stop_token_ids=tuple(range(reference.vocab_size))))
        assert np.diff(all_stop.offsets).tolist() == [1] * len(question.seeds)
        assert (all_stop.finish_reasons == FinishReason.STOP).all()

    def test_stop_strings_end_a_sample(
        self,
        generator: GeneratorUnderTest,
        policy: ReferencePolicy,
        question: Question,
        decode: Callable[[Int32Array], str],
    ) -> None:
        """A sample ends with the token that completes a stop string in the response; the prompt's text does not count."""
        generator.require(capabilities.STOP_STRINGS)
        free = [decode(sample) for sample in samples_of(generator.generate(question))]
        longest = max(free, key=len)
        prompt = decode(question.prompts.sequence(3))
        strings = (longest[2:4], prompt[:2])
        assert all(strings), "the tokenizer decodes to nothing"
        sampling = SamplingParams(stop_strings=strings)
        result = generator.generate(question, 0, sampling)
        generator.assert_logprobs(policy, question, result, sampling)
        stopped = result.finish_reasons == FinishReason.STOP
        for index, sample in enumerate(samples_of(result)):
            assert not any(string in decode(sample[:-1]) for string in strings), "a sample goes on after a stop string"
            assert stopped[index] == any(string in decode(sample) for string in strings)
            assert stopped[index] or len(sample) == question.max_tokens[index]
        if capabilities.PER_SAMPLE_SEEDS in generator.provider.capabilities:
            assert stopped[free.index(longest)], "the same seed without the stop string came past it"
            assert not stopped.all()

    def test_stop_strings_end_long_samples(
        self, generator: GeneratorUnderTest, reference: Reference, decode: Callable[[Int32Array], str]
    ) -> None:
        """One that many samples come to late ends each of them where it is completed."""
        generator.require(capabilities.STOP_STRINGS)
        question = make_long_question(reference.vocab_size, 2)
        string = late_string([decode(sample) for sample in samples_of(generator.generate(question))])
        result = generator.generate(question, 0, SamplingParams(stop_strings=(string,)))
        for sample, reason in zip(samples_of(result), result.finish_reasons, strict=True):
            completed = first_with(string, sample, decode)
            assert len(sample) == len(completed), (
                f"a sample of {len(sample)} tokens holds the stop string after {len(completed)}"
            )
            assert (reason == FinishReason.STOP) == (string in decode(sample))
            assert reason == FinishReason.STOP or len(sample) == LONG

    def test_stop_strings_are_of_generated_text_alone(
        self, generator: GeneratorUnderTest, question: Question, decode: Callable[[Int32Array], str]
    ) -> None:
        """One that the prompt begins and the response completes does not end a sample; its second half does. Greedily, so that
        no seed is needed, and one prompt at a time, so that nothing is rounded otherwise."""
        generator.require(capabilities.STOP_STRINGS)
        num_told = 0
        for index in range(0, len(question.seeds), question.num_samples):
            one = question.ungrouped([index])
            (sample,) = samples_of(generator.generate(one, 0, GREEDY))
            prompt, completed = decode(one.prompts.sequence(0)), decode(sample[:2])
            string = prompt[-3:] + completed
            if not prompt or not completed or string in decode(sample):
                continue
            num_told += 1
            for stop, expected in ((string, sample), (completed, first_with(completed, sample, decode))):
                (found,) = samples_of(generator.generate(one, 0, evolve(GREEDY, stop_strings=(stop,))))
                assert found.tolist() == expected.tolist(), (
                    f"stop string {stop!r} after prompt …{prompt[-5:]!r}: found {len(found)} tokens; expected {len(expected)}"
                )
        assert num_told > 0, "the tokenizer decodes no prompt, or no sample, to a text"


def first_with(string: str, sample: Int32Array, decode: Callable[[Int32Array], str]) -> Int32Array:
    """The tokens of a sample up to the one that completes a string in its text, or all."""
    return next((sample[:end] for end in range(1, len(sample)) if string in decode(sample[:end])), sample)


def late_string(texts: Sequence[str]) -> str:
    """The two characters that most of the texts hold, but not in their first quarter."""
    pairs = sorted({text[start : start + 2] for text in texts for start in range(len(text) - 1)})
    assert pairs, "the tokenizer decodes to nothing"
    return max(pairs, key=lambda pair: sum(text.find(pair) > len(text) // 4 for text in texts))


def undecided_prompt(policy: ReferencePolicy, vocab_size: int, sampling: SamplingParams) -> Int32Array:
    """int32 [4]: of some random prompts the one after which most is left to chance."""
    prompts = np.random.default_rng(6).integers(0, vocab_size, (16, 4), dtype=np.int32)
    tables = [np.exp(sampling_distribution(policy.logits(prompt)[-1:], sampling)[0]) for prompt in prompts]
    return np.asarray(prompts[np.argmin([(table**2).sum() for table in tables])])


def frequency_problems(
    limits: Limits, tokens: Int32Array, by_number: Float64Array, by_probability: Float64Array, repeats: Float64Array
) -> dict[str, str]:
    """Return the figures beyond the limits, by name, of two tokens a sample, `tokens` int32 [S, 2], and what `transformed`
    returns for them."""
    found = {}
    draws = {
        f"frequencies of token {position + 1} in the order of {order}": values[:, position]
        for order, values in (("numbers", by_number), ("probabilities", by_probability))
        for position in (0, 1)
    }
    for name, values in draws.items():
        if (gap := distance_to_uniform(values)) > limits.kolmogorov_smirnov:
            found[name] = f"{name} are off: Kolmogorov-Smirnov distance times √n is {gap:.2f}"
    firsts = by_number[:, 0]
    pairs = {"a sample's tokens": by_number.T, "neighbouring seeds": np.stack([firsts[:-1], firsts[1:]])}
    for name, (one, other) in pairs.items():
        correlation = np.corrcoef(one, other)[0, 1]
        if abs(correlation) >= limits.deviations / np.sqrt(len(one)):
            found[name] = f"{name} are correlated by {correlation:.2f}"
    num_repeated, variance = (tokens[:, 0] == tokens[:, 1]).sum(), max((repeats * (1 - repeats)).sum(), 1.0)
    if abs(num_repeated - repeats.sum()) >= limit_of(limits.deviations, variance) * np.sqrt(variance):
        found["repeats"] = f"{num_repeated} samples repeat their first token; expected {repeats.sum():.1f} by chance"
    return found


def transformed(
    policy: ReferencePolicy, prompt: Int32Array, tokens: Int32Array, sampling: SamplingParams
) -> tuple[Float64Array, Float64Array, Float64Array]:
    """The randomised probability integral transform of two tokens a sample, `tokens` int32 [S, 2]: float64 [S, 2] with the
    tokens in the order of their numbers, [S, 2] in that of their probabilities; and [S] how probable the second is to
    repeat the first."""
    random = np.random.default_rng(7)
    by_number, by_probability, repeats = np.empty(tokens.shape), np.empty(tokens.shape), np.empty(len(tokens))
    rows: dict[int, Float64Array] = {}
    for index, (first, second) in enumerate(tokens.tolist()):
        if first not in rows:
            logits = policy.logits(np.append(prompt, np.int32(first)))[-2:]
            rows[first] = np.exp(sampling_distribution(logits, sampling)[0])
        repeats[index] = rows[first][1][first]
        for position, token in enumerate((first, second)):
            probabilities = rows[first][position]
            within = random.random() * probabilities[token]
            by_number[index, position] = probabilities[:token].sum() + within
            by_probability[index, position] = probabilities[probabilities > probabilities[token]].sum() + within
    return by_number, by_probability, repeats
