"""Log-probabilities and entropies of packed tokens, against transformers in float32."""

import numpy as np
import pytest
from mlx_support import arrays, loaded, spec_of

from rlcore.spi import TokenBatch
from rlcore_conformance.references.huggingface_reference import HuggingFaceReference
from rlcore_conformance.references.reference import reference_logprobs
from rlcore_conformance.trainers.batches import make_batch
from rlcore_mlx.figures import token_figures


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama", "mistral"])
@pytest.mark.parametrize("max_chunk_logits", [1, 1000, 2**24])
def test_figures_are_those_of_transformers_in_chunks_of_any_size(architecture, max_chunk_logits, model_directory):
    directory = model_directory(architecture)
    decoder, weights = loaded(directory)
    batch = make_batch(decoder.dims.vocab_size, seed=3)
    policy = HuggingFaceReference(spec_of(directory)).load(arrays(weights))
    expected = reference_logprobs(policy, batch, 0.7)
    for found, figures in zip(token_figures(decoder, weights, batch, 0.7, max_chunk_logits), expected, strict=True):
        np.testing.assert_allclose(np.array(found), figures, atol=1e-4)
        assert not np.array(found)[batch.offsets[:-1]].any()


def test_sequences_of_one_token_have_none(model_directory):
    decoder, weights = loaded(model_directory())
    batch = TokenBatch(tokens=np.array([4, 5], np.int32), offsets=np.arange(3), loss_mask=np.zeros(2, bool))
    assert [np.array(each).tolist() for each in token_figures(decoder, weights, batch, 1.0, 2**24)] == [[0.0, 0.0]] * 2
