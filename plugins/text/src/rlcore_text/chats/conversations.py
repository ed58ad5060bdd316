"""The conversations of episodes, and the tokens that each of them reads next."""

from collections.abc import Sequence

import numpy as np

from rlcore.run.data.text import History, NextInput
from rlcore.spi import ContractError, DataError, Observation, Tokenizer
from rlcore_text.chats.conversation import Conversation, RewritingTemplateError
from rlcore_text.chats.long_texts import shortened

REMEDY = (
    'Let such conversations go on in another sequence with rollout.history = "segment", keep the sampled tokens with '
    '"keep_sampled", or set model.chat_template to a template that leaves earlier turns as they were'
)


class Conversations:
    """The conversations of episodes by their numbers, and the tokens that each reads after a turn."""

    def __init__(self, tokenizer: Tokenizer, stop_token_ids: Sequence[int], history: History = "segment") -> None:
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
    ) -> list[NextInput | DataError]:
        """The input that each of some episodes reads next: text and tokens as they are, of messages what the chat template adds
        to the conversation. Where the template rewrites what there is already, the whole conversation in a new segment with
        "segment", and the error with "refuse". ContractError for messages in an episode that did not begin with some. A text
        far beyond `most_tokens` is encoded in part."""
        texts, other = [], dict[int, NextInput | DataError]()
        for index, (episode, observation) in enumerate(zip(episodes, observations, strict=True)):
            try:
                text, begins = self._text(episode, observation)
            except DataError as error:
                other[episode], text, begins = error, "", False
            encode = self._tokenizer.encode if begins else self._encode_behind
            text = shortened(text, most_tokens[index], encode) if most_tokens else text
            if begins:
                other[episode], text = (np.asarray(encode(text), np.int32), True), ""
            texts.append(text)
        encoded = self._tokenizer.encode_behind(texts)
        read: list[NextInput | DataError] = []
        for episode, observation, tokens in zip(episodes, observations, encoded, strict=True):
            if episode in other:
                read.append(other[episode])
            elif observation.tokens is not None:
                read.append((observation.tokens, False))
            else:
                ended = observation.messages is not None and tokens[:1] == [self._ends[episode]]
                read.append((np.asarray(tokens[1:] if ended else tokens, np.int32), False))
        return read

    def _encode_behind(self, text: str) -> list[int]:
        return self._tokenizer.encode_behind([text])[0]

    def _text(self, episode: int, observation: Observation) -> tuple[str, bool]:
        """Return the text to encode for an observation, empty for tokens, and whether it begins a segment."""
        conversation = self._conversations[episode]
        if observation.messages is None:
            if conversation is not None:
                tokens = () if observation.tokens is None else observation.tokens
                self._conversations[episode] = conversation.with_text(observation.text or self._tokenizer.decode(tokens))
            return observation.text or "", False
        if conversation is None:
            raise ContractError(
                "the environment answered with messages in an episode whose prompt was text or tokens: no chat template can "
                "tell how they go on. Begin with messages too, or answer with text"
            )
        try:
            self._conversations[episode], text = conversation.answered(observation.messages, self._tokenizer, self._history)
        except RewritingTemplateError as error:
            if self._history == "refuse":
                raise DataError(f"{error}. {REMEDY}") from error
            begun = conversation.anew(observation.messages, self._tokenizer)
            self._conversations[episode], text = begun, begun.opened
            return text, True
        return text, False
