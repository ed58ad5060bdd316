"""Which JSON schemas samples can be held to."""

import json

import pytest

from rlcore.spi import DataError
from rlcore_torchkit.json_schema import guided_schema

WRONG = {
    "empty_enum": ({"enum": []}, "anyOf is empty"),
    "empty_range": ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum (3)"),
    "empty_lengths": ({"type": "string", "minLength": 4, "maxLength": 2}, "minLength (4) is greater than maxLength (2)"),
    "empty_counts": ({"type": "array", "minItems": 3, "maxItems": 1}, "minItems (3) is greater than maxItems (1)"),
    "no_multiple": ({"type": "integer", "multipleOf": 10, "minimum": 1, "maximum": 9}, "does not contain a multiple of 10"),
    "two_types": ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible types"),
    "other_constant": ({"type": "string", "const": 3}, "incompatible types"),
    "no_such_text": ({"type": "string", "pattern": "^a{3}$", "maxLength": 2}, "Regex is empty"),
    "required_and_forbidden": (
        {"type": "object", "properties": {"a": {}}, "required": ["b"], "additionalProperties": False},
        "required property 'b' is unsatisfiable",
    ),
    "unknown_type": ({"type": "word"}, "Invalid type: word"),
    "broken_pattern": ({"type": "string", "pattern": "^(a"}, "unclosed group"),
    "dangling_reference": ({"$ref": "#/$defs/x"}, "does not exist"),
    "not_enforced": ({"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
    "unique_items": ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
    "own_options": ({"x-guidance": {"lenient": True}, "not": {}}, 'Unimplemented keys: ["not"]'),
    "no_object": ([], "expected a JSON Schema that is an object"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_schema_that_no_text_can_be_held_to_is_refused(name: str) -> None:
    schema, found = WRONG[name]
    with pytest.raises(DataError) as raised:
        guided_schema(json.dumps(schema))
    assert found in str(raised.value)


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(DataError) as raised:
        guided_schema("{")
    assert "no JSON" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "is_text_of_it"),
    [
        ('{"a":1,"b":["x","x"]}', True),
        ('{"a": 1, "b": ["x", "x"]}', True),
        ('{"a": 1, "b": []}', True),
        ('{"a":  1, "b": []}', False),
        ('{ "a": 1, "b": [] }', False),
        ('{"b": [], "a": 1}', False),
        ('{"a": 1}', False),
        ('{"a": 10, "b": []}', False),
    ],
)
def test_texts_are_those_of_json_dumps_or_without_spaces(text: str, is_text_of_it: bool) -> None:
    """Whitespace is bounded, and properties come in the order of the schema."""
    from llguidance import LLMatcher, LLTokenizer

    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}, "b": {"type": "array", "items": {"const": "x"}}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(guided_schema(json.dumps(schema))))
    assert (matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()) is is_text_of_it
