"""An episode's conversation: what the policy reads after a turn is what the chat template adds to all that it has seen."""

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
from attrs import evolve, frozen

from rlcore.run.data.tokenizer import Tokenizer
from rlcore.spi import ContractError, DataError, Message, Observation
from rlcore.spi.arrays import Int32Array

MARK = "\ue000rlcore\ue000"
"""Stands for the policy's turn where only what surrounds it is wanted: private-use characters, which no template looks for."""
REMEDY = "Set model.chat_template to one that leaves earlier turns as they were, or let the environment answer with text"


@frozen(kw_only=True, eq=False)
class Conversation:
    """What an episode has said and read, as messages."""

    messages: tuple[Message, ...]
    """All messages before the policy's present turn."""
    shown: str
    """`messages` through the chat template, up to where the policy's turn begins."""
    turn: str = ""
    """The present turn: what the policy said, without special tokens, and what an environment put behind it as it is."""

    @classmethod
    def begin(cls, messages: Sequence[Message], tokenizer: Tokenizer) -> "Conversation":
        """Start a conversation with the prompt's messages."""
        return cls(messages=tuple(messages), shown=tokenizer.render_chat(messages))

    def with_text(self, text: str) -> "Conversation":
        """Return the conversation with more text of the present turn."""
        return evolve(self, turn=self.turn + text)

    def answered(self, messages: Sequence[Message], tokenizer: Tokenizer) -> "tuple[Conversation, str]":
        """Return the conversation with the environment's messages, and what the template puts behind the policy's turn.

        White space that a template takes from the edges of a turn, or puts into it, is passed over: the policy's tokens stay
        as they were sampled. DataError where the template changes anything else of what it has shown or of what was said.
        """
        after = tuple(messages)
        whole = self._render(self.turn, after, tokenizer)
        so_far = self.shown + self.turn
        added = whole[len(so_far) :] if whole.startswith(so_far) else self._added(whole, after, tokenizer)
        spoken: Message = {"role": "assistant", "content": self.turn}
        return Conversation(messages=(*self.messages, spoken, *after), shown=whole), added

    def _added(self, whole: str, after: tuple[Message, ...], tokenizer: Tokenizer) -> str:
        head, found, added = self._render(MARK, after, tokenizer).partition(MARK)
        if not found:
            raise DataError(f"the chat template leaves the policy's turn out once the conversation goes on. {REMEDY}")
        if head != self.shown:
            raise DataError(
                "the chat template rewrites what it had shown before the policy's turn once the conversation goes on: "
                f"{_difference(head, self.shown)}. {REMEDY}"
            )
        expected = f"{head}{self.turn}{added}"
        if "".join(whole.split()) != "".join(expected.split()):
            raise DataError(f"the chat template rewrites what the policy said: {_difference(whole, expected)}. {REMEDY}")
        return added

    def _render(self, turn: str, after: tuple[Message, ...], tokenizer: Tokenizer) -> str:
        return tokenizer.render_chat([*self.messages, {"role": "assistant", "content": turn}, *after])


class Conversations:
    """The conversations of N episodes, and the tokens that each reads after a turn."""

    def __init__(self, num_episodes: int, tokenizer: Tokenizer, stop_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._conversations: list[Conversation | None] = [None] * num_episodes
        self._ends = np.full(num_episodes, -1, np.int64)
        """The stop token that ends the present turn and is no part of its text; -1 where none does."""
        self._silent = {token for token in stop_token_ids if not tokenizer.decode([token])}

    def begin(self, episodes: Sequence[int], prompt: Observation) -> None:
        """Some episodes begin with the same prompt; only of messages a conversation can be told."""
        if prompt.messages is not None:
            begun = Conversation.begin(prompt.messages, self._tokenizer)
            for episode in episodes:
                self._conversations[episode] = begun

    def add_turn(self, episode: int, text: str, last_token: int | None) -> None:
        """Add what the policy said in an episode: its text without special tokens, and its last token."""
        conversation = self._conversations[episode]
        if conversation is not None:
            self._conversations[episode] = conversation.with_text(text)
        self._ends[episode] = -1 if last_token not in self._silent else last_token

    def read(self, episodes: Sequence[int], observations: Sequence[Observation]) -> list[Int32Array | DataError]:
        """The tokens that each of some episodes reads next, int32 [length]: text and tokens as they are, of messages what the
        chat template adds to the conversation. The error in place of them where the template rewrites what there is already;
        ContractError for messages in an episode that did not begin with some."""
        texts, refused = [], {}
        for episode, observation in zip(episodes, observations, strict=True):
            try:
                texts.append(self._text(episode, observation))
            except DataError as error:
                refused[episode] = error
                texts.append("")
        encoded = self._tokenizer.encode_batch(texts)
        read: list[Int32Array | DataError] = []
        for episode, observation, tokens in zip(episodes, observations, encoded, strict=True):
            if episode in refused:
                read.append(refused[episode])
            elif observation.tokens is not None:
                read.append(observation.tokens)
            else:
                ended = observation.messages is not None and tokens[:1] == [self._ends[episode]]
                read.append(np.asarray(tokens[1:] if ended else tokens, np.int32))
        return read

    def _text(self, episode: int, observation: Observation) -> str:
        """What is to be encoded for an observation; empty for tokens."""
        conversation = self._conversations[episode]
        if observation.messages is None:
            if conversation is not None:
                tokens = () if observation.tokens is None else observation.tokens
                self._conversations[episode] = conversation.with_text(observation.text or self._tokenizer.decode(tokens))
            return observation.text or ""
        if conversation is None:
            raise ContractError(
                "the environment answered with messages in an episode whose prompt was text or tokens: no chat template can "
                "tell how they go on. Begin with messages too, or answer with text"
            )
        self._conversations[episode], text = conversation.answered(observation.messages, self._tokenizer)
        return text


def _difference(found: str, expected: str) -> str:
    """Where two texts part, with a little of each."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(found, expected, strict=False)))
    start = max(same - 20, 0)
    return f"found {found[start : same + 40]!r}; expected {expected[start : same + 40]!r}"
