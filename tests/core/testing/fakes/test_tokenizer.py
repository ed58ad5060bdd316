"""The tokenizer of the fakes."""

from hypothesis import given
from hypothesis import strategies as st

from rlcore.testing.fakes.tokenizer import ALPHABET, VOCABULARY_SIZE, FakeTokenizer


@given(st.text(ALPHABET))
def test_the_tokenizer_brings_text_back(text):
    tokenizer = FakeTokenizer()
    tokens = tokenizer.encode(text)
    assert tokenizer.decode([*tokens, tokenizer.eos_token_id]) == text
    assert all(0 < token < VOCABULARY_SIZE for token in tokens)


def test_the_tokenizer_knows_no_other_characters():
    tokenizer = FakeTokenizer()
    assert tokenizer.decode(tokenizer.encode("Aé1漢")) == "a???"
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(chat) == "user: hi\nassistant: "
