"""Pieces of an answer go out while its tokens come, and together they are the whole answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore_serve.sessions.live_text import LiveText, Parts, certain_parts, split_thought

from .chat_model import END, END_ID, ChatMl

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
FRAGMENTS = (
    "<think>",
    "</think>",
    "<th",
    "[",
    "[THINK]",
    "analysis",
    "a",
    " ",
    "\n",
    "<",
    "{",
    CALL,
    "<b>",
    "é",
    "assistantfinal",
)
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)


def streamed(text: str, parts: Parts, **options: object) -> list[tuple[str, str]]:
    """All pieces of a text that comes one token at a time."""
    tokenizer = ChatMl()
    live = LiveText(**{"decode": tokenizer.decode, "show": tokenizer.show, "is_chat": True} | options)
    pieces = [piece for token in tokenizer.encode(text) for piece in live.add([token])]
    return pieces + live.end(parts)


@given(text=TEXTS, is_thinking=st.booleans(), has_tools=st.booleans(), size=st.integers(0, 80))
def test_what_is_certain_stays(text: str, is_thinking: bool, has_tools: bool, size: int) -> None:
    whole = split_thought(text, is_thinking=is_thinking)
    content = whole.content.lstrip() if has_tools else whole.content
    certain = certain_parts(text[:size], is_thinking=is_thinking, has_tools=has_tools)
    assert whole.reasoning.startswith(certain.reasoning)
    assert content.startswith(certain.content)
    assert certain.content == "" or certain.reasoning == whole.reasoning


@given(text=TEXTS, is_thinking=st.booleans(), has_tools=st.booleans())
def test_the_pieces_are_the_whole_answer(text: str, is_thinking: bool, has_tools: bool) -> None:
    whole = split_thought(text, is_thinking=is_thinking)
    whole = Parts(whole.reasoning, whole.content.lstrip() if has_tools else whole.content)
    pieces = streamed(text, whole, is_thinking=is_thinking, has_tools=has_tools)
    for kind in ("reasoning", "content"):
        assert "".join(text for name, text in pieces if name == kind) == getattr(whole, kind)


@pytest.mark.parametrize(
    ("text", "options", "first"),
    [
        ("Well, so.", {}, [("content", "W"), ("content", "e")]),
        ("<think>No. ", {}, [("reasoning", "N"), ("reasoning", "o")]),
        ("No.</think>Yes", {"is_thinking": True}, [("reasoning", "N"), ("reasoning", "o"), ("reasoning", ".")]),
        (
            "So.<tool_call>",
            {"has_tools": True},
            [("content", "S"), ("content", "o"), ("content", "."), ("content", "<tool_call>")],
        ),
        ("{}", {"has_tools": True}, [("content", "{}")]),
        ("b STOP", {"stops": ("STOP",)}, [("content", "b"), ("content", " STOP")]),
        ("<b>", {"is_chat": False}, [("content", "<"), ("content", "b")]),
        (f"a{END}", {"has_tools": True}, [("content", "a")]),
    ],
)
def test_text_goes_out_as_soon_as_it_is_certain(text: str, options: dict[str, object], first: list[tuple[str, str]]) -> None:
    whole = split_thought(
        ChatMl().decode([token for token in ChatMl().encode(text) if token != END_ID]),
        is_thinking=bool(options.get("is_thinking")),
    )
    assert streamed(text, whole, **options)[: len(first)] == first


def test_an_answer_that_is_not_the_streamed_one_is_an_error() -> None:
    with pytest.raises(ValueError, match="streamed content"):
        streamed("abc", Parts("", "xyz"))
