"""The order of a chat's messages: what contradicts itself is named once, with what was expected."""

import pytest

from rlcore.spi import Message
from rlcore_text.chats.message_order import order_fault
from rlcore_text.chats.messages import read_messages
from rlcore_text.rows.row_fields import reply_fault

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": "c"}


def calls(*ids: str) -> Message:
    made = [{"id": one, "type": "function", "function": {"name": "f", "arguments": {}}} for one in ids]
    return {"role": "assistant", "content": "", "tool_calls": made}


def result(call_id: str | None = None, role: str = "tool") -> Message:
    return {"role": role, "content": "1"} | ({} if call_id is None else {"tool_call_id": call_id})


UNNAMED = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}


@pytest.mark.parametrize(
    "messages",
    [
        [SYSTEM, USER, ANSWER, USER],
        [ANSWER, USER],
        [USER, calls("1", "2"), result("2"), result("1"), ANSWER],
        [USER, calls("1"), result("1"), calls("2"), result("2"), USER],
        [USER, calls("1"), result(role="function"), USER, SYSTEM, USER],
        [USER, UNNAMED, result("7"), ANSWER, USER],
        [USER, calls("1"), USER],
    ],
)
def test_an_order_that_agents_send_has_no_fault(messages: list[Message]) -> None:
    assert order_fault(read_messages(messages)) is None


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ([USER, ANSWER, ANSWER, USER], "message 2, the assistant's, right behind another answer; "),
        ([USER, calls("1"), ANSWER, result("1")], "message 2, the assistant's, right behind another answer; "),
        ([USER, result("1")], "message 1, a tool's result, without a call before it; "),
        ([result()], "message 0, a tool's result, without a call before it; "),
        ([USER, result("1"), calls("1"), USER], "message 1, a tool's result, before message 2, which has its call; "),
        (
            [USER, ANSWER, result("1")],
            "message 2, a tool's result, behind the assistant's message 1, which has no tool_calls; ",
        ),
        ([USER, calls("1", "2"), result("3")], "message 2, the result of the call '3'; expected one of the calls of the "),
        ([USER, calls("1"), USER, result("1")], "message 3, a tool's result, without a call before it; "),
    ],
)
def test_what_contradicts_itself_is_named(messages: list[Message], found: str) -> None:
    fault = order_fault(read_messages(messages))
    assert fault is not None
    assert fault.startswith(found)
    assert "expected" in fault


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([USER], None),
        ([result("1"), result("2")], None),
        ([result("1"), USER], None),
        ([ANSWER, USER], "with message 0, the assistant's, right behind another answer; "),
        ([USER, result("1")], "with message 1, a tool's result, without a call before it; "),
        ([USER, ANSWER, ANSWER, USER], "with message 2, the assistant's, right behind another answer; "),
    ],
)
def test_a_reply_follows_the_policys_answer(messages: list[Message], fault: str | None) -> None:
    found = reply_fault(messages)
    assert found is fault is None or (found is not None and fault is not None and found.startswith(fault))


def test_what_was_sampled_has_no_fault() -> None:
    """An answer behind a prompt that ends with the assistant's message."""
    messages = [USER, ANSWER, calls("1"), result("1"), ANSWER, USER]
    assert order_fault(messages, num_known=3) is None
    fault = order_fault(messages, num_known=2)
    assert fault is not None
    assert fault.startswith("message 2, ")


def test_answers_in_a_row_may_be_allowed_and_results_keep_their_order() -> None:
    assert order_fault([USER, ANSWER, ANSWER, USER], allows_repeats=True) is None
    assert order_fault([USER, result("1")], allows_repeats=True) is not None
