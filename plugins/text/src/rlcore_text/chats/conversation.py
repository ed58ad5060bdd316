"""A conversation: what the policy reads after a turn is what the chat template adds to all that it has seen."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Protocol

from attrs import evolve, frozen

from rlcore.run.data.text import History
from rlcore.spi import DataError, Message, Tool
from rlcore_text.chats.message_order import RESULTS
from rlcore_text.chats.messages import ASSISTANT, read_message, role_of
from rlcore_text.chats.tool_calls import THOUGHT

MARK = "\ue000rlcore\ue000"
"""Stands for the policy's turn where only what surrounds it is wanted: private-use characters, which no template looks for."""
INSTRUCTIONS = ("system", "developer")
"""Roles of the messages that a conversation begins with."""


class RewritingTemplateError(DataError):
    """The chat template changes what it had shown, or what was said, once the conversation goes on."""


class ChatRenderer(Protocol):
    """The tokenizer's methods that a conversation calls."""

    def render_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the messages through the chat template, up to where the assistant's answer begins. DataError where the
        template refuses them."""


@frozen(kw_only=True, eq=False)
class Conversation:
    """The messages of an episode.

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
    """The rendered conversation, up to where the present turn begins."""
    turn: str = ""
    """The present turn: what the policy said, without special tokens, and what an environment put behind it as it is."""
    num_answered: int = 0
    """Turns before the present one that were answered with messages."""

    @classmethod
    def begin(
        cls, messages: Sequence[Message], tokenizer: ChatRenderer, tools: Sequence[Tool] = (), *, continues: bool = False
    ) -> "Conversation":
        """Start a conversation with the prompt's messages and tools. With `continues`, a last message that is the assistant's
        begins the present turn. Otherwise that message is complete, as in OpenAI's API."""
        opened, begun = opened_prompt(messages, tokenizer, tools) if continues else (tokenizer.render_chat(messages, tools), "")
        before = tuple(messages[:-1] if continues and ends_with_answer(messages) else messages)
        return cls(messages=before, tools=tuple(tools), opening=len(before), opened=opened, shown=opened, turn=begun)

    def anew(self, messages: Sequence[Message], tokenizer: ChatRenderer) -> "Conversation":
        """Return a conversation that begins with all messages so far, the present turn and the environment's messages, as the
        template renders them now."""
        return Conversation.begin([*self.messages, {"role": ASSISTANT, "content": self.turn}, *messages], tokenizer, self.tools)

    def with_text(self, text: str) -> "Conversation":
        """Return the conversation with more text of the present turn."""
        return evolve(self, turn=self.turn + text)

    def answered(
        self, messages: Sequence[Message], tokenizer: ChatRenderer, history: History = "segment"
    ) -> "tuple[Conversation, str]":
        """Return the conversation with the environment's messages, and what the template puts behind the policy's turn.

        White space that a template takes from the edges of a turn, or puts into it, is passed over: the policy's tokens stay
        as they were sampled. RewritingTemplateError where the template changes anything else of what it has shown or of what
        was said; with "keep_sampled" both stay, and only what comes behind the turn is taken from it.
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
                raise RewritingTemplateError("the chat template leaves the policy's turn out once the conversation goes on")
            if history != "keep_sampled":
                self._require_same(begins, head, whole, added)
        gone_on = evolve(
            self,
            messages=(*self.messages, {"role": "assistant", "content": self.turn}, *after),
            shown=f"{self.shown}{self.turn}{added}",
            turn="",
            num_answered=self.num_answered + 1,
        )
        if history != "keep_sampled" and len(before) < len(self.messages) and gone_on.num_answered.bit_count() == 1:
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

    def _render(self, before: Sequence[Message], turn: str, after: Sequence[Message], tokenizer: ChatRenderer) -> str:
        return tokenizer.render_chat([*before, {"role": "assistant", "content": turn}, *after], self.tools)

    def _require_same(self, begins: str, head: str, whole: str, added: str) -> None:
        """RewritingTemplateError unless the template has left what stood before the turn, and the turn but for white space."""
        if head.rstrip() != begins.rstrip():
            raise RewritingTemplateError(
                "the chat template rewrites what it had shown before the policy's turn once the conversation goes on: "
                f"{_difference(head, begins)}"
            )
        _require_alike(whole, f"{head}{self.turn}{added}", "what the policy said")


def ends_with_answer(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the last message is the assistant's."""
    return bool(messages) and role_of(messages[-1]) == ASSISTANT


def behind_prompt(prompt: Sequence[Any], answers: Sequence[Any]) -> list[Any]:
    """Join a prompt's messages and those of its answer. DataError where the prompt already begins that answer, or the answer
    begins with another prompt."""
    first, last = (role_of(messages[end]) if messages else "" for messages, end in ((answers, 0), (prompt, -1)))
    if first == last == ASSISTANT:
        raise DataError(
            "a prompt that ends with a message of the assistant's, and an answer that begins with another; expected the rest "
            "of the answer as text"
        )
    goes_on = first not in INSTRUCTIONS and last in (ASSISTANT, *INSTRUCTIONS) and answers[:1] != prompt[:1]
    if first not in ("", ASSISTANT) and not goes_on:
        raise DataError(
            f"an answer that begins with a message of the role {first!r}; expected the assistant's behind the prompt"
        )
    return [*prompt, *answers]


def opened_prompt(messages: Sequence[Message], tokenizer: ChatRenderer, tools: Sequence[Tool] = ()) -> tuple[str, str]:
    """Render a prompt up to where an answer begins, and return that text and the beginning of the answer. The beginning is the
    text of a last message that is the assistant's. DataError where the policy cannot continue it."""
    if not ends_with_answer(messages):
        return tokenizer.render_chat(messages, tools), ""
    last = read_message(messages[-1], is_last=True)
    begun = last["content"]
    if len(messages) == 1 or set(last) - {"role", "content"} or not isinstance(begun, str):
        raise DataError(
            "a prompt ends with a message of the assistant's, which has to be the beginning of an answer: found "
            f"{last!r:.80}; expected text alone, behind another message"
        )
    opened = tokenizer.render_chat(messages[:-1], tools)
    shown = opened.rstrip()
    if shown.endswith(THOUGHT) and begun.lstrip().startswith(THOUGHT):  # the template has opened it already
        begun, space = begun.lstrip().removeprefix(THOUGHT), opened[len(shown) :]
        begun = begun.removeprefix(space) if begun.startswith(space) else begun.lstrip()
    return opened, begun


def _require_alike(found: str, expected: str, what: str) -> None:
    """RewritingTemplateError unless two texts are the same but for white space."""
    if "".join(found.split()) != "".join(expected.split()):
        raise RewritingTemplateError(f"the chat template rewrites {what}: {_difference(found, expected)}")


def _difference(found: str, expected: str) -> str:
    """Show where two texts part, with a little of each."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(found, expected, strict=False)))
    start = max(same - 20, 0)
    return f"found {found[start : same + 40]!r}; expected {expected[start : same + 40]!r}"
