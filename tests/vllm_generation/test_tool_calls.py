"""vLLM's own parsers of tools' calls, and the core's, which agree with them on every call that can be read."""

import pytest

from rlcore.spi import ModelSpec
from rlcore_text.chats.tool_calls import FORMS
from rlcore_torchkit.testing.models import make_tokenizer
from rlcore_vllm.engines.tool_calls import tool_parser

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
        },
    }
]
TEXTS = {
    "hermes": [
        "no call",
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü <b>"}}\n</tool_call>',
        '<tool_call>{"name": "add", "arguments": {}}</tool_call>\n<tool_call>{"name": "f", "arguments": {"x": [1, {}]}}',
    ],
    "llama3_json": [
        "no call",
        '{"name": "add", "parameters": {"a": 1}}',
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "f", "arguments": {"x": "}; {"}}',
    ],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ModelSpec:
    from tokenizers import Tokenizer

    directory = tmp_path_factory.mktemp("model")
    make_tokenizer(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|python_tag|>"])
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return ModelSpec(path=str(directory))


@pytest.mark.parametrize("name", TEXTS)
def test_the_cores_forms_are_vllms(name: str, model: ModelSpec) -> None:
    theirs = tool_parser(name, model)
    assert theirs is not None
    for text in TEXTS[name]:
        (content, calls), (_, own) = theirs(text, TOOLS), FORMS[name](text, TOOLS)
        assert [(call.name, call.arguments, call.error) for call in calls] == [
            (call.name, call.arguments, call.error) for call in own
        ]
        assert content == ("" if calls else text)


def test_a_form_that_vllm_alone_reads_knows_the_types_of_the_schema(model: ModelSpec) -> None:
    parse = tool_parser("qwen3_coder", model)
    assert parse is not None
    arguments = "<parameter=a>\n12\n</parameter>\n<parameter=b>\n34\n</parameter>"
    text = f"Adding.\n<tool_call>\n<function=add>\n{arguments}\n</function>\n</tool_call>"
    content, (call,) = parse(text, TOOLS)
    assert (content.strip(), call.name, call.arguments) == ("Adding.", "add", {"a": 12, "b": "34"})


def test_another_name_is_none_of_its_parsers(model: ModelSpec) -> None:
    assert tool_parser("acme", model) is None
