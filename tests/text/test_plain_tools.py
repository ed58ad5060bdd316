"""Tools in the text of a conversation, for chat templates that read none."""

from rlcore_text.chats.plain_tools import as_text, shows_tools, with_tools

TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
WRITTEN = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_a_template_that_reads_tools_is_told_from_one_that_does_not() -> None:
    assert shows_tools("{% for tool in tools %}{{ tool }}{% endfor %}")
    assert not shows_tools("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert not shows_tools(None)


def test_tools_are_described_in_the_first_message() -> None:
    for role in ("system", "user"):
        first, second = with_tools([{"role": role, "content": "Be brief."}, {"role": "user", "content": "1+0?"}], [TOOL])
        assert '"name": "add"' in first["content"]
        assert first["content"].endswith("\n\nBe brief.")
        assert second["content"] == "1+0?"


def test_calls_and_results_are_text() -> None:
    messages = [
        {"role": "assistant", "content": "So.", "tool_calls": [CALL]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
        {"role": "tool", "content": "2", "tool_call_id": "d"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
    ]
    answered = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert as_text(messages) == [
        {"role": "assistant", "content": f"So.\n{WRITTEN}"},
        {"role": "user", "content": answered},
        {"role": "assistant", "content": WRITTEN},
    ]
