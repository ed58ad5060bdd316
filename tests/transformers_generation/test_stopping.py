"""Stop strings on a byte-level tokenizer, whose tokens may end inside a character."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rlcore_transformers.stopping import StopStrings


@pytest.fixture(scope="module")
def byte_tokenizer():
    """One token per byte, and one for a pair."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary["ab"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def first_stop(tokenizer, tokens, strings):
    """Index of the first token at which a StopStrings says that one is complete."""
    stops = StopStrings(tokenizer, strings)
    return next((index for index, token in enumerate(tokens) if stops.complete(token)), None)


@settings(deadline=None, max_examples=150)
@given(
    text=st.text("ab é€😀\n", min_size=1, max_size=25),
    strings=st.lists(st.text("ab é€😀\n", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_it_stops_at_the_token_that_completes_a_string(byte_tokenizer, text, strings):
    tokens = byte_tokenizer.encode(text).ids
    texts = [byte_tokenizer.decode(tokens[: n + 1]) for n in range(len(tokens))]
    expected = next((n for n, seen in enumerate(texts) if any(string in seen for string in strings)), None)
    assert first_stop(byte_tokenizer, tokens, tuple(strings)) == expected


def test_the_string_may_end_inside_a_token(byte_tokenizer):
    tokens = byte_tokenizer.encode("xxab").ids
    assert len(tokens) == 3
    assert first_stop(byte_tokenizer, tokens, ("xa",)) == 2
