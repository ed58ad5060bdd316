"""Calls of tools in text: those of the families' forms, and everything that is none of them, which ends no run."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.spi import ConfigError, ToolCall
from rlcore.thoughts import without_thoughts
from rlcore_text.chats.tool_calls import FORMS, ToolParser, form_of

from .chat_templates import FAMILIES  # type: ignore[import-not-found]

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda part: st.lists(part, max_size=3) | st.dictionaries(TEXT, part, max_size=3),
    max_leaves=6,
)
PIECES = ['<tool_call>{"name":', '"a"', "</tool_call>", "<|python_tag|>", "}", ";", "{"]


def parser(name: str) -> ToolParser:
    found = ToolParser.named(name, None)
    assert found is not None
    return found


def read(name: str, text: str) -> tuple[str, list[tuple[str, object, bool]]]:
    content, calls = parser(name).parse(text)
    assert [call.id for call in calls] == [f"call_{number}" for number in range(len(calls))]
    return content, [(call.name, dict(call.arguments), call.error is None) for call in calls]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("just text", "just text", []),
        ('<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', "", [("f", {"x": 1}, True)]),
        ('Hm. <tool_call>{"name": "f", "arguments": {}}', "Hm.", [("f", {}, True)]),
        (
            '<tool_call>{"name": "f", "arguments": {}}</tool_call> and '
            '<tool_call>{"name": "g", "arguments": {"y": [2]}}</tool_call>',
            "and",
            [("f", {}, True), ("g", {"y": [2]}, True)],
        ),
        ('<think>Not <tool_call>{} yet.</think>\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>',
         "<think>Not <tool_call>{} yet.</think>", [("f", {}, True)]),
        ("<think>I might <tool_call>", "<think>I might <tool_call>", []),
        *(
            (f"{begin}x <tool_call>{{}}</tool_call>{end}", f"{begin}x <tool_call>{{}}</tool_call>{end}", [])
            for begin, end in (
                *(("[THINK]", ""), ("[THINK]", "[/THINK]ok"), ("<thinking>", "</thinking>ok"), (" <Think>", "</Think>")),
                *(("<seed:think>", ""), ("", "</seed:think>ok"), ("<think>a</think>b<think>", "</think>")),
            )
        ),
        ("<tool_call>{oops}</tool_call>", "", [("", {}, False)]),
        ('<tool_call>{"name": "f", "argum', "", [("", {}, False)]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", {}, False)]),
        ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "", [("f", {}, False)]),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', "", [("", {}, False)]),
        ('<tool_call>["f"]</tool_call>', "", [("", {}, False)]),
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "", [("", {}, False)]),
        ('<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>', "", [("", {}, False)]),
        (f'<tool_call>{{"name": "f", "arguments": {"[" * 100_000}', "", [("", {}, False)]),
        (f'<tool_call>{{"name": "f", "arguments": {{"x": {"9" * 5000}}}}}</tool_call>', "", [("", {}, False)]),
    ],
)  # fmt: skip
def test_hermes(text: str, content: str, calls: list[object]) -> None:
    assert read("hermes", text) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("just text", "just text", []),
        ("{1, 2}", "{1, 2}", []),
        ('{"name": "f", "parameters": {"x": 1}}', "", [("f", {"x": 1}, True)]),
        ('<|python_tag|>{"name": "f", "parameters": {"x": 1}}', "", [("f", {"x": 1}, True)]),
        ('Hm.<|python_tag|>{"name": "f", "arguments": {}}', "Hm.", [("f", {}, True)]),
        (
            '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"y": "a; b"}}',
            "",
            [("f", {}, True), ("g", {"y": "a; b"}, True)],
        ),
        ('{"name": "f", "parameters": {}}; {"name": "g"', "", [("f", {}, True), ("", {}, False)]),
        ('{"name": "f", "parameters": {}} as I said', "", [("", {}, False)]),
        ("<|python_tag|>print(1)", "", [("", {}, False)]),
        ("<|python_tag|>", "", [("", {}, False)]),
    ],
)
def test_llama3_json(text: str, content: str, calls: list[object]) -> None:
    assert read("llama3_json", text) == (content, calls)


THOUGHT = "<|channel|>analysis<|message|>I add to=functions.g.<|end|>"
ANALYSIS = f"{THOUGHT}<|start|>assistant"
CALL = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f'{ANALYSIS}{CALL}{{"a": 1}}', THOUGHT, [("add", {"a": 1}, True)]),
        (f'{ANALYSIS}{CALL}{{"a": 1}}<|call|>', THOUGHT, [("add", {"a": 1}, True)]),
        (' to=functions.add<|channel|>commentary json<|message|>{"a": 1}', "", [("add", {"a": 1}, True)]),
        (
            f"{ANALYSIS} to=functions.add<|channel|>commentary json<|message|>{{}}",
            THOUGHT,
            [("add", {}, True)],
        ),
        (f"{ANALYSIS}{CALL}oops", THOUGHT, [("add", {}, False)]),
        (f"{CALL}[]", "", [("add", {}, False)]),
        (f"{ANALYSIS}<|channel|>final<|message|>2", f"{ANALYSIS}<|channel|>final<|message|>2", []),
        (
            f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}{{}}",
            "<|channel|>commentary<|message|>I look.<|end|>",
            [("add", {}, True)],
        ),
        ("<|channel|>commentary<|message|>I look.", "<|channel|>commentary<|message|>I look.", []),
        (f"<|channel|>analysis<|message|>{CALL[11:]}{{}}", f"<|channel|>analysis<|message|>{CALL[11:]}{{}}", []),
    ],
)
def test_calls_of_gpt_oss_are_messages_of_its_commentary(text: str, content: str, calls: list[object]) -> None:
    assert read("openai", text) == (content, calls)


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (f"{ANALYSIS}{CALL}{{}}", f"{CALL}{{}}"),
        ("analysisI add.assistantcommentary to=functions.add json{}", "assistantcommentary to=functions.add json{}"),
        ("analysisI add.assistantcommentaryI look.assistantfinal2", "2"),
        ("analysisI add.", ""),
    ],
)
def test_the_commentary_of_gpt_oss_is_no_thought(response: str, said: str) -> None:
    assert without_thoughts(response) == said


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=50)
@given(text=TEXT, pieces=st.lists(st.sampled_from(PIECES), max_size=8))
def test_no_text_raises(name: str, text: str, pieces: list[str]) -> None:
    for written in (text, "".join(pieces), "".join([*pieces, text])):
        content, calls = parser(name).parse(written)
        assert isinstance(content, str)
        assert all(isinstance(call, ToolCall) for call in calls)


@settings(max_examples=50)
@given(arguments=st.dictionaries(TEXT, JSON, max_size=3))
def test_arguments_come_back_as_they_were_written(arguments: dict[str, object]) -> None:
    call = json.dumps({"name": "f", "arguments": arguments}).replace("<", "\\u003c")
    assert read("hermes", f"<tool_call>{call}</tool_call>")[1] == [("f", arguments, True)]
    call = json.dumps({"name": "f", "parameters": arguments}).replace("</think>", "\\u003c/think>")
    assert read("llama3_json", call)[1] == [("f", arguments, True)]


@pytest.mark.parametrize("thought", ["", "<think>one <think>more</think>", "[THINK]one[/THINK]", "one</think>"])
@pytest.mark.parametrize("text", ["<thinking>plan</thinking> go", "assistantFinalReport", "<think>", "[THINK] a [/THINK]"])
def test_marks_within_arguments_are_text(thought: str, text: str) -> None:
    call = f"<tool_call>{json.dumps({'name': 'f', 'arguments': {'text': text}})}</tool_call>"
    assert read("hermes", f"{thought}{call}{call}")[1] == [("f", {"text": text}, True)] * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_the_chat_template_decides(family: str) -> None:
    form, template = FAMILIES[family].form, FAMILIES[family].template
    found = ToolParser.named("auto", template)
    assert form_of(template) == form == (None if found is None else found.name)


def test_other_forms_within_the_same_tags_are_none_of_the_cores() -> None:
    assert form_of("{{ tools }}<tool_call>\n<function=name>") is None


def test_a_name_is_the_cores_or_the_generators() -> None:
    def engine(name: str):  # type: ignore[no-untyped-def]
        return (lambda text, tools: (f"{text} {len(tools)}", ())) if name == "acme" else None

    found = ToolParser.named("acme", None, engine)
    assert found is not None
    assert found.parse("text", [{}]) == ("text 1", ())
    with pytest.raises(ConfigError) as raised:
        ToolParser.named("acmee", None, engine)
    assert [(problem.path, problem.found) for problem in raised.value.problems] == [("rollout.tool_parser", '"acmee"')]


def test_a_parser_that_raises_has_read_no_call() -> None:
    def engine(name: str):  # type: ignore[no-untyped-def]
        def parse(text: str, tools: object) -> None:
            raise KeyError(name)

        return parse

    found = ToolParser.named("acme", None, engine)
    assert found is not None
    content, (call,) = found.parse("some text")
    assert (content, call.name, call.text, call.error) == ("some text", "", "some text", "KeyError: 'acme'")
