"""An episode's conversation: what the policy reads after a turn is what the chat template adds to all that it has seen."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Literal, TypeAlias

import numpy as np
from attrs import evolve, frozen

from rlcore.run.data.tokenizer import Tokenizer
from rlcore.spi import ContractError, DataError, Message, Observation, Tool
from rlcore.spi.arrays import Int32Array

History: TypeAlias = Literal["refuse", "as_seen"]
"""What to do where a template would rewrite what it has shown: `rollout.history`."""
MARK = "\ue000rlcore\ue000"
"""Stands for the policy's turn where only what surrounds it is wanted: private-use characters, which no template looks for."""
REMEDY = (
    'Set rollout.history = "as_seen" to keep what was shown, model.chat_template to a template that leaves earlier turns as '
    "they were, or let the environment answer with text"
)
INSTRUCTIONS = ("system", "developer")
"""Roles of the messages that a conversation begins with."""
RESULTS = ("tool", "ipython", "function")
"""Roles of messages that continue the query before them; all others begin another one."""


@frozen(kw_only=True, eq=False)
class Conversation:
    """What an episode has said and read, as messages.

    What a template puts behind a turn is read off a part of the conversation, so that N turns cost N times as much as one and
    not N² times: its instructions, its last query, and what is new. All messages since that query belong to it where a new one
    comes, since that is when templates take thoughts out of them. The whole conversation is rendered beside it at the turns 1,
    2, 4, 8 and so on, which would show a template that rewrites anything else.
    """

    messages: tuple[Message, ...]
    """All messages before the policy's present turn."""
    tools: tuple[Tool, ...] = ()
    opening: int
    """How many of the messages are the prompt's."""
    opened: str
    """The prompt through the chat template, up to where the first turn begins."""
    shown: str
    """All that was read and said, up to where the present turn begins."""
    turn: str = ""
    """The present turn: what the policy said, without special tokens, and what an environment put behind it as it is."""
    num_answered: int = 0
    """Turns before the present one that were answered with messages."""

    @classmethod
    def begin(cls, messages: Sequence[Message], tokenizer: Tokenizer, tools: Sequence[Tool] = ()) -> "Conversation":
        """Start a conversation with the prompt's messages and tools."""
        opened = tokenizer.render_chat(messages, tools)
        return cls(messages=tuple(messages), tools=tuple(tools), opening=len(messages), opened=opened, shown=opened)

    def with_text(self, text: str) -> "Conversation":
        """Return the conversation with more text of the present turn."""
        return evolve(self, turn=self.turn + text)

    def answered(
        self, messages: Sequence[Message], tokenizer: Tokenizer, history: History = "refuse"
    ) -> "tuple[Conversation, str]":
        """Return the conversation with the environment's messages, and what the template puts behind the policy's turn.

        White space that a template takes from the edges of a turn, or puts into it, is passed over: the policy's tokens stay
        as they were sampled. With "refuse", DataError where the template changes anything else of what it has shown or of what
        was said; with "as_seen" both stay, and only what comes behind the turn is taken from it.
        """
        after = tuple(messages)
        before = self._window(after)
        begins = self.opened if before == self.messages[: self.opening] else tokenizer.render_chat(before, self.tools)
        whole = self._render(before, self.turn, after, tokenizer)
        so_far = begins + self.turn
        if whole.startswith(so_far):
            added = whole[len(so_far) :]
        else:
            head, found, added = self._render(before, MARK, after, tokenizer).partition(MARK)
            if not found:
                raise DataError(f"the chat template leaves the policy's turn out once the conversation goes on. {REMEDY}")
            if history == "refuse":
                self._require_same(begins, head, whole, added)
        gone_on = evolve(
            self,
            messages=(*self.messages, {"role": "assistant", "content": self.turn}, *after),
            shown=f"{self.shown}{self.turn}{added}",
            turn="",
            num_answered=self.num_answered + 1,
        )
        if history == "refuse" and len(before) < len(self.messages) and gone_on.num_answered.bit_count() == 1:
            _require_alike(tokenizer.render_chat(gone_on.messages, self.tools), gone_on.shown, "what it had shown")
        return gone_on, added

    def _window(self, after: Sequence[Message]) -> tuple[Message, ...]:
        """The messages before the present turn that decide what comes behind it."""
        roles = [message["role"] for message in self.messages]
        first = next((index for index, role in enumerate(roles) if role not in INSTRUCTIONS), len(roles))
        query = max((index for index, role in enumerate(roles) if role == "user"), default=first)
        goes_on = all(message["role"] in RESULTS for message in after)
        end = max(query + 1, self.opening) if goes_on else len(roles)
        return (*self.messages[:first], *self.messages[query:end])

    def _render(self, before: Sequence[Message], turn: str, after: Sequence[Message], tokenizer: Tokenizer) -> str:
        return tokenizer.render_chat([*before, {"role": "assistant", "content": turn}, *after], self.tools)

    def _require_same(self, begins: str, head: str, whole: str, added: str) -> None:
        """DataError unless the template has left what stood before the turn, and the turn but for white space."""
        if head != begins:
            raise DataError(
                "the chat template rewrites what it had shown before the policy's turn once the conversation goes on: "
                f"{_difference(head, begins)}. {REMEDY}"
            )
        _require_alike(whole, f"{head}{self.turn}{added}", "what the policy said")


class Conversations:
    """The conversations of episodes by their numbers, and the tokens that each reads after a turn."""

    def __init__(self, tokenizer: Tokenizer, stop_token_ids: Sequence[int], history: History = "refuse") -> None:
        self._tokenizer = tokenizer
        self._history: History = history
        self._conversations: dict[int, Conversation | None] = {}
        self._ends: dict[int, int | None] = {}
        """The stop token that ends the present turn and is no part of its text; None where none does."""
        self._silent = {token for token in stop_token_ids if not tokenizer.decode([token])}

    def begin(self, episodes: Sequence[int], prompt: Observation) -> None:
        """Some episodes begin with the same prompt; only of messages a conversation can be told."""
        begun = None if prompt.messages is None else Conversation.begin(prompt.messages, self._tokenizer, prompt.tools)
        self._conversations |= dict.fromkeys(episodes, begun)
        self._ends |= dict.fromkeys(episodes)

    def __contains__(self, episode: int) -> bool:
        """Whether an episode has begun that has not ended."""
        return episode in self._conversations

    def state(self, episode: int) -> tuple[Conversation | None, int | None]:
        """What `restore` needs; of an episode that its environment could not begin too."""
        return self._conversations.get(episode), self._ends.get(episode)

    def restore(self, episode: int, state: tuple[Conversation | None, int | None]) -> None:
        """Go on with a conversation that was left."""
        self._conversations[episode], self._ends[episode] = state

    def end(self, episode: int) -> None:
        """Forget a conversation."""
        self._conversations.pop(episode, None)
        self._ends.pop(episode, None)

    def add_turn(self, episode: int, text: str, last_token: int | None) -> None:
        """Add what the policy said in an episode: its text without special tokens, and its last token."""
        conversation = self._conversations[episode]
        if conversation is not None:
            self._conversations[episode] = conversation.with_text(text)
        self._ends[episode] = last_token if last_token in self._silent else None

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
        self._conversations[episode], text = conversation.answered(observation.messages, self._tokenizer, self._history)
        return text


def _require_alike(found: str, expected: str, what: str) -> None:
    """DataError unless two texts are the same but for white space."""
    if "".join(found.split()) != "".join(expected.split()):
        raise DataError(f"the chat template rewrites {what}: {_difference(found, expected)}. {REMEDY}")


def _difference(found: str, expected: str) -> str:
    """Where two texts part, with a little of each."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(found, expected, strict=False)))
    start = max(same - 20, 0)
    return f"found {found[start : same + 40]!r}; expected {expected[start : same + 40]!r}"
