"""Checks of what a generator says about the tokens that truncated sampling had kept."""

import numpy as np
import pytest

from rlcore.spi import SamplingParams, capabilities
from rlcore_conformance.generators.generator_fixtures import (
    GeneratorFixtures,
    GeneratorUnderTest,
    Question,
    assert_same_samples,
    samples_of,
)
from rlcore_conformance.references.reference import Float64Array, ReferencePolicy, log_softmax, sampling_distribution

TRUNCATED = {
    "top_k": (SamplingParams(temperature=0.8, top_k=3), (capabilities.TOP_K,)),
    "top_p": (SamplingParams(temperature=1.3, top_p=0.7), (capabilities.TOP_P,)),
    "top_k_top_p": (SamplingParams(temperature=1.3, top_k=5, top_p=0.8), (capabilities.TOP_K, capabilities.TOP_P)),
}


class GeneratorSamplingMask(GeneratorFixtures):
    """The kept tokens reported are those that tokens were sampled among, and whose softmax their log-probabilities are of."""

    @pytest.mark.parametrize("name", TRUNCATED)
    def test_kept_tokens_are_those_sampled_among(
        self, generator: GeneratorUnderTest, policy: ReferencePolicy, question: Question, name: str
    ) -> None:
        """Kept tokens are the reference's, where rounding does not decide them; everywhere the log-probabilities are normalised
        over them, each token is among its own, and asking for them changes nothing else."""
        generator.require(capabilities.SAMPLING_MASK)
        sampling, needed = TRUNCATED[name]
        for capability in needed:
            generator.require(capability)
        plain = generator.generate(question, 0, sampling)
        result = generator.handle.generate(question.request(sampling, 0, sampling_mask=True))
        if generator.provider.capabilities >= {capabilities.PER_SAMPLE_SEEDS}:
            assert_same_samples(result, plain, range(len(question.seeds)), generator.tolerance)
        assert result.sampling_mask is not None
        kept = np.split(result.sampling_mask.tokens, result.sampling_mask.offsets[1:-1])
        logprobs, at, num_clear = result.logprobs.astype(np.float64), 0, 0
        for index, response in enumerate(samples_of(result)):
            prompt = question.prompts.sequence(index // question.num_samples)
            logits = policy.logits(np.concatenate([prompt, response]))[len(prompt) - 1 : -1]
            table, margin = sampling_distribution(logits, sampling)
            for row, token in enumerate(response.tolist()):
                found, place = kept[at], f"sample {index}, token {row}"
                expected = renormalised(logits[row] / sampling.temperature, found, token)
                off = abs(logprobs[at] - expected)
                assert off <= generator.tolerance, f"{place}: its log-probability is off by {off:.3g} over the kept tokens"
                if margin[row] >= generator.edge:
                    wanted = np.flatnonzero(np.isfinite(table[row])).tolist()
                    assert sorted(found.tolist()) == wanted, f"{place}: found {sorted(found.tolist())}; expected {wanted}"
                    num_clear += 1
                at += 1
        assert num_clear > 0, "rounding decides everywhere what is kept: the model's probabilities are too much alike"

    def test_nothing_is_left_out_of_the_whole_distribution(self, generator: GeneratorUnderTest, question: Question) -> None:
        """Rows are empty, greedy ones too: their log-probabilities are of the whole distribution."""
        generator.require(capabilities.SAMPLING_MASK)
        for sampling in (SamplingParams(), SamplingParams(temperature=0.0)):
            result = generator.handle.generate(question.request(sampling, 0, sampling_mask=True))
            assert result.sampling_mask is not None
            assert not len(result.sampling_mask.tokens)


def renormalised(logits: Float64Array, kept: np.ndarray[tuple[int], np.dtype[np.int32]], token: int) -> float:
    """The log-probability of a token over these alone."""
    assert len(kept) > 0, "found no kept tokens; expected some, since sampling is truncated"
    return float(log_softmax(logits[kept])[kept.tolist().index(token)])
