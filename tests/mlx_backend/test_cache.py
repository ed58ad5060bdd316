"""Token by token the cache gives the logits of a whole forward pass."""

import mlx.core as mx
import numpy as np
from mlx_support import loaded

from rlcore_mlx import cache as module
from rlcore_mlx.cache import Cache
from rlcore_mlx.packing import PackedSequences


def logits_after(decoder, weights, tokens):
    packed = PackedSequences.of(np.array([0, len(tokens)]))
    hidden = decoder.hidden(weights, mx.array(tokens), packed.positions, packed.attend)
    return np.array(hidden[-1] @ decoder.head(weights).T)


def test_logits_are_those_of_a_whole_pass_also_when_rows_leave(model_directory, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 4)
    decoder, weights = loaded(model_directory())
    random = np.random.default_rng(0)
    prompts = [random.integers(0, decoder.dims.vocab_size, length).astype(np.int32) for length in (3, 11, 1)]
    rows = np.array([0, 0, 1, 2])
    texts = [list(prompts[row]) for row in rows]
    cache = Cache(decoder, weights)
    logits = cache.begin(prompts, rows)
    for step in range(11):
        expected = [logits_after(decoder, weights, np.array(text)) for text in texts]
        np.testing.assert_allclose(np.array(logits), expected, atol=1e-4)
        if step == 5:
            logits = cache.keep(np.array([3, 1]), logits)
            texts = [texts[3], texts[1]]
        tokens = random.integers(0, decoder.dims.vocab_size, len(texts)).astype(np.int32)
        for text, token in zip(texts, tokens, strict=True):
            text.append(token)
        logits = cache.step(tokens)
