"""Checks of samples that have to fulfil a JSON Schema."""

import json
from collections.abc import Callable

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import DataError, FinishReason, ModelSpec, SamplingParams, capabilities
from rlcore.spi.arrays import Int32Array
from rlcore_conformance.generators.generator_fixtures import GeneratorFixtures, GeneratorUnderTest, Question, samples_of
from rlcore_conformance.generators.generator_sampling_mask import renormalised
from rlcore_conformance.references.reference import ReferencePolicy

NUMBERS, WORDS = (1, 23), ("a", "bc")
SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": NUMBERS}, "w": {"enum": WORDS}},
    "required": ["n", "w"],
    "additionalProperties": False,
}
ENOUGH = 40
"""More tokens than a text of SCHEMA has."""
WRONG = {
    "unfulfillable": {"enum": []},
    "empty_range": {"type": "integer", "minimum": 5, "maximum": 3},
    "contradiction": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "unknown_type": {"type": "word"},
}


class GeneratorStructuredOutput(GeneratorFixtures):
    """Samples with a schema fulfil it, and are distributed over the tokens that it allows."""

    @pytest.fixture
    def end(self, generator: GeneratorUnderTest, model: ModelSpec) -> int:
        """The token that ends a text, by the model's tokenizer."""
        generator.require(capabilities.STRUCTURED_OUTPUT)
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        return int(tokenizer.eos_token_id)

    @pytest.mark.parametrize("temperature", [1.3, 0.0])
    @pytest.mark.parametrize("top_k", [0, 2])
    def test_samples_fulfil_the_schema(
        self,
        generator: GeneratorUnderTest,
        policy: ReferencePolicy,
        question: Question,
        end: int,
        decode: Callable[[Int32Array], str],
        temperature: float,
        top_k: int,
    ) -> None:
        """Every sample is a text of the schema and a stop token. Its log-probabilities are normalised over the kept tokens that
        it reports, so that a trainer which normalises over them computes the same."""
        generator.require(capabilities.STRUCTURED_OUTPUT)
        if top_k:
            generator.require(capabilities.TOP_K)
        asks = capabilities.SAMPLING_MASK in generator.provider.capabilities
        sampling = SamplingParams(temperature=temperature, top_k=top_k, stop_token_ids=(end,), json_schema=json.dumps(SCHEMA))
        long = evolve(question, max_tokens=np.full_like(question.max_tokens, ENOUGH))
        result = generator.handle.generate(long.request(sampling, 0, sampling_mask=asks))
        assert (result.finish_reasons == FinishReason.STOP).all(), "a sample did not end after a text of the schema"
        at = 0
        for index, response in enumerate(samples_of(result)):
            text = decode(response)
            found = json.loads(text)
            assert set(found) == {"n", "w"}, text
            assert found["n"] in NUMBERS, text
            assert found["w"] in WORDS, text
            if result.sampling_mask is not None and temperature:
                prompt = question.prompts.sequence(index // question.num_samples)
                logits = policy.logits(np.concatenate([prompt, response]))[len(prompt) - 1 : -1]
                mask = result.sampling_mask.slice(at, at + len(response))
                for row, token in enumerate(response.tolist()):
                    kept = mask.tokens[mask.offsets[row] : mask.offsets[row + 1]]
                    off = abs(float(result.logprobs[at + row]) - renormalised(logits[row] / temperature, kept, token))
                    assert off <= generator.tolerance, f"sample {index}, token {row}: off by {off:.3g} over the kept tokens"
            at += len(response)

    @pytest.mark.parametrize("name", WRONG)
    def test_wrong_schemas_are_refused(self, generator: GeneratorUnderTest, question: Question, end: int, name: str) -> None:
        """A schema that no text fulfils, or that is none, is refused before anything is sampled."""
        generator.require(capabilities.STRUCTURED_OUTPUT)
        sampling = SamplingParams(stop_token_ids=(end,), json_schema=json.dumps(WRONG[name]))
        with pytest.raises(DataError):
            generator.generate(question, 0, sampling)
