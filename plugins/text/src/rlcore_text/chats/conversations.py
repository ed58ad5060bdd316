"""The conversations of episodes, and the tokens that each of them reads next."""

from collections.abc import Sequence

import numpy as np

from rlcore.run.data.text import History
from rlcore.spi import ContractError, DataError, Observation, Tokenizer
from rlcore.spi.arrays import Int32Array
from rlcore_text.chats.conversation import Conversation, RewritingTemplateError
from rlcore_text.chats.long_texts import shortened

REMEDY = (
    'Set rollout.history = "keep_sampled" to keep the sampled tokens, model.chat_template to a template that leaves earlier '
    "turns as they were, or let the environment answer with text"
)


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
        begun = None
        if prompt.messages is not None:
            begun = Conversation.begin(prompt.messages, self._tokenizer, prompt.tools, continues=True)
        self._conversations |= dict.fromkeys(episodes, begun)
        self._ends |= dict.fromkeys(episodes)

    def __contains__(self, episode: int) -> bool:
        """Return whether an episode has begun that has not ended."""
        return episode in self._conversations

    def state(self, episode: int) -> tuple[Conversation | None, int | None]:
        """Return the state that `restore` needs; of an episode that its environment could not begin too."""
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

    def read(
        self, episodes: Sequence[int], observations: Sequence[Observation], most_tokens: Sequence[int] = ()
    ) -> list[Int32Array | DataError]:
        """The tokens that each of some episodes reads next, int32 [length]: text and tokens as they are, of messages what the
        chat template adds to the conversation. The error in place of them where the template rewrites what there is already;
        ContractError for messages in an episode that did not begin with some. A text far beyond `most_tokens` is encoded in
        part."""
        texts, refused = [], {}
        for episode, observation in zip(episodes, observations, strict=True):
            try:
                texts.append(self._text(episode, observation))
            except RewritingTemplateError as error:
                refused[episode] = DataError(f"{error}. {REMEDY}")
                texts.append("")
            except DataError as error:
                refused[episode] = error
                texts.append("")
        for index, most in enumerate(most_tokens):
            texts[index] = shortened(texts[index], most, lambda text: self._tokenizer.encode_behind([text])[0])
        encoded = self._tokenizer.encode_behind(texts)
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
        """Return the text to encode for an observation; empty for tokens."""
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
