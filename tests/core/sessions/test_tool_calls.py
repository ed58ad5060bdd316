"""Tool calls in answers."""

import pytest

from rlcore.sessions.tool_calls import ToolCall, ToolParser


def test_calls_are_taken_out_of_the_text() -> None:
    text = 'Both: <tool_call>\n{"name": "f", "arguments": {"x": [1]}}\n</tool_call><tool_call>{"name": "g"}</tool_call>'
    assert ToolParser().parse(text) == ("Both:", [ToolCall(name="f", arguments={"x": [1]}), ToolCall(name="g")])


@pytest.mark.parametrize("inside", ["", "{", "[]", '{"name": 3}', '{"arguments": {}}', '{"name": "f", "arguments": "x"}'])
def test_what_is_no_call_stays_text(inside: str) -> None:
    text = f" a <tool_call>{inside}</tool_call> "
    assert ToolParser().parse(text) == (text, [])
