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


@pytest.fixture(scope="module")
def fallback_tokenizer():
    """Llama's decoder: a token per byte, whose bytes show as one text where they are characters and else as a mark each."""
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "▁a": 257, "end": 258}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


@settings(deadline=None, max_examples=100)
@given(tokens=st.lists(st.integers(0, 258) | st.integers(129, 257), min_size=1, max_size=40))
def test_bytes_that_are_no_characters_raise_nothing_and_hide_no_stop(fallback_tokenizer, tokens):
    assert first_stop(fallback_tokenizer, [*(token for token in tokens if token != 258), 258], ("end",)) is not None


def test_a_stop_behind_broken_bytes_is_found(fallback_tokenizer):
    broken = [ord("F") + 1, *[0xF0 + 1] * 23, 0]
    assert first_stop(fallback_tokenizer, [*broken, 257, 258], ("end",)) == len(broken) + 1
