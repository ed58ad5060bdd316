"""Checks the order of a chat's messages: an answer is one message, and a tool's result stands behind its call."""

from collections.abc import Sequence

from rlcore.spi import Message
from rlcore_text.chats.messages import ASSISTANT

RESULTS = ("tool", "ipython", "function")
"""Roles of messages that continue the query before them; all others begin another one."""


def order_fault(
    messages: Sequence[Message], *, num_known: int = 0, follows_answer: bool = False, allows_repeats: bool = False
) -> str | None:
    """Return why messages, each as `read_message` returns it, contradict each other; None where they do not. The text completes
    "found …". The first `num_known` of them are as the policy saw and sampled them, and have no fault. With `follows_answer` an
    answer of the policy, whose calls its text has, stands before the first one. With `allows_repeats` two answers in a row,
    which need not be samples, have no fault."""
    answer: Message | None = None
    number_of_answer, is_answered = -1, follows_answer
    for number, message in enumerate(messages):
        role = message["role"]
        if role == ASSISTANT:
            is_repeat = is_answered and (number == 0 or messages[number - 1]["role"] == ASSISTANT)
            if number >= num_known and is_repeat and not allows_repeats:
                return (
                    f"message {number}, the assistant's, right behind another answer; expected one message for each sampled "
                    "answer, and a message between two answers"
                )
            answer, number_of_answer, is_answered = message, number, True
        elif role in RESULTS and number >= num_known:
            if answer is not None and (fault := _result_fault(message, number, answer, number_of_answer)):
                return fault
            if not is_answered:
                return _without_call(messages, number)
        elif role not in RESULTS:
            answer, is_answered = None, False
    return None


def _result_fault(message: Message, number: int, answer: Message, number_of_answer: int) -> str | None:
    """Return why a tool's result does not belong to the calls of the answer before it."""
    calls = answer.get("tool_calls", ())
    if not calls:
        return (
            f"message {number}, a tool's result, behind the assistant's message {number_of_answer}, which has no tool_calls; "
            "expected the call that it answers there"
        )
    ids, call_id = [call["id"] for call in calls if "id" in call], message.get("tool_call_id")
    if call_id is None or not ids or call_id in ids:
        return None
    return (
        f"message {number}, the result of the call {call_id!r:.40}; expected one of the calls of the assistant's message "
        f"{number_of_answer}: {', '.join(map(repr, ids))}"
    )


def _without_call(messages: Sequence[Message], number: int) -> str:
    call_id = messages[number].get("tool_call_id")
    later = (
        place
        for place, message in enumerate(messages[number:], start=number)
        if call_id is not None and any(call.get("id") == call_id for call in message.get("tool_calls", ()))
    )
    if (place := next(later, None)) is not None:
        return f"message {number}, a tool's result, before message {place}, which has its call; expected it behind that message"
    return f"message {number}, a tool's result, without a call before it; expected it behind the answer with its call"
