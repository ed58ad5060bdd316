"""Texts far beyond what a model reads are encoded in part: in sessions and in what environments show."""

import numpy as np
import pytest

from rlcore.spi import Observation
from rlcore.testing.fakes import FakeTokenizer
from rlcore_text.chats.conversations import Conversations
from rlcore_text.chats.long_texts import CHARACTERS_PER_TOKEN, shortened


class Counting(FakeTokenizer):
    """Notes the lengths of what it encodes."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def encode(self, text: str) -> list[int]:
        self.lengths.append(len(text))
        return super().encode(text)


@pytest.mark.parametrize(
    ("length", "tokens_of", "kept"),
    [
        (160, len, 160),
        (161, len, 160),
        (10**7, len, 160),
        (161, lambda text: len(text) // 8, 161),
        (10**7, lambda text: 20, 10**7),
    ],
)
def test_a_text_is_cut_where_its_beginning_is_too_long(length, tokens_of, kept):
    assert len(shortened("x" * length, 10, lambda text: range(tokens_of(text)))) == kept


@pytest.mark.parametrize("number", [1, 3])
def test_an_observation_of_megabytes_is_not_encoded_whole(number):
    tokenizer, episodes = Counting(), range(number)
    conversations = Conversations(tokenizer, ())
    conversations.begin(episodes, Observation(text="a"))
    shown = [Observation(text="1" * 4_000_000), Observation(text="12"), Observation(tokens=np.arange(9, dtype=np.int32))]
    read = conversations.read(episodes, shown[:number], [5, 5, 5][:number])
    assert [len(tokens) for tokens, _ in read] == [5 * CHARACTERS_PER_TOKEN, 2, 9][:number]
    assert max(tokenizer.lengths) == 5 * CHARACTERS_PER_TOKEN
