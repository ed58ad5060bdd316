"""What the conformance kit does not ask of the generator: small batches, prompts at the limit, tensors of another model."""

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx_support import loaded, make_generator

from rlcore.spi import GenerateRequest, RaggedTokens, RefitError, RefitRequest, SamplingParams
from rlcore_conformance.generators.generator_fixtures import make_question
from rlcore_conformance.references.tensors import make_export


def refit(generator, weights, version):
    export = make_export({name: torch.as_tensor(weight) for name, weight in weights.items()}, version)
    return generator.refit(RefitRequest(weight_version=version, channel="in_process", weights=export, may_alias=True))


def test_the_size_of_batches_changes_no_sample(model_directory):
    decoder, _ = loaded(model_directory())
    request = make_question(decoder.dims.vocab_size).request(SamplingParams(), 0)
    together, apart = (make_generator(model_directory(), max_batch_size=size).generate(request) for size in (256, 3))
    np.testing.assert_array_equal(together.tokens, apart.tokens)
    np.testing.assert_array_equal(together.offsets, apart.offsets)
    np.testing.assert_allclose(together.logprobs, apart.logprobs, atol=1e-4)


def test_no_prompts_bring_no_samples(model_directory):
    request = GenerateRequest(
        prompts=RaggedTokens.from_lists([]),
        num_samples=2,
        seeds=np.zeros(0, np.int64),
        max_tokens=np.zeros(0, np.int32),
        sampling=SamplingParams(),
        weight_version=0,
    )
    assert make_generator(model_directory()).generate(request).offsets.tolist() == [0]


@pytest.mark.parametrize(
    ("change", "found"), [({"other": mx.ones(2)}, "unknown"), ({"model.norm.weight": mx.ones(2)}, "shape")]
)
def test_weights_of_another_model_are_refused(change, found, model_directory):
    _, weights = loaded(model_directory())
    generator = make_generator(model_directory())
    with pytest.raises(RefitError, match=found):
        refit(generator, {**weights, **change}, 1)
    refit(generator, weights, 2)
    assert all(mx.array_equal(generator.weights[name], weight) for name, weight in weights.items())
