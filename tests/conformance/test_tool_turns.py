"""Calls of tools as policies write them."""

import pytest

from rlcore.spi import Observation
from rlcore_conformance.environments.tool_turns import UNREAD, check_tools, tool_turns

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {
                "box": {"type": "integer"},
                "how": {"enum": ["well", "badly"]},
                "whom": {"type": ["string", "null"]},
                "where": {"type": "object", "properties": {"x": {"type": "number"}}},
            },
        },
    },
}
MESSAGES = [{"role": "user", "content": "Look."}]


def test_tools_are_called_rightly_and_wrongly():
    turns = tool_turns([LOOK, {"type": "function", "function": {"name": "wait"}}])
    assert len(turns) == 10
    (call,) = turns["a call of look"].tool_calls
    assert call.arguments == {"box": 1, "how": "well", "whom": "a", "where": {"x": 0.5}}
    assert (call.name, call.error) == ("look", None)
    assert turns["a call of look without arguments"].tool_calls[0].arguments == {}
    assert turns["a call of look with arguments of wrong types"].tool_calls[0].arguments["box"] == ["?"]
    assert [call.id for call in turns["two calls of wait"].tool_calls] == ["call_0", "call_1"]
    (unread,) = turns["a call that could not be read"].tool_calls
    assert (unread.name, unread.arguments, unread.text) == ("", {}, UNREAD)
    assert unread.error


def test_tools_that_are_right_pass():
    check_tools(Observation(messages=MESSAGES, tools=[LOOK]))
    check_tools(Observation(text="Look."))


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (Observation(text="Look.", tools=[LOOK]), "tools and no messages"),
        (Observation(messages=MESSAGES, tools=[{"name": "look"}]), "found the tool"),
        (Observation(messages=MESSAGES, tools=["look"]), "found the tool"),
        (Observation(messages=MESSAGES, tools=[{"function": {"name": "look", "x": {1}}}]), "is no JSON"),
    ],
)
def test_tools_that_a_run_refuses_fail(observation, message):
    with pytest.raises(AssertionError, match=message):
        check_tools(observation)
