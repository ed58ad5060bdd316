"""Values as JSON, and what a program may send in their place."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore_code.questions import answered, pack, unpack

HASHABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
PLAIN = st.recursive(
    HASHABLE | st.complex_numbers(allow_nan=False) | st.just(10**40),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(HASHABLE, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50)
@given(PLAIN)
def test_plain_data_come_back(value):
    found = unpack(json.loads(json.dumps(pack(value))))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("value", [object(), [object()], {1: len}, range(3)])
def test_other_objects_are_no_answers(value):
    with pytest.raises(TypeError, match="no plain data"):
        pack(value)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "3",
        '{"error": "ValueError"}',
        '{"value": [1]}',
        '{"value": {}}',
        '{"value": {"set": [{"list": []}]}}',
        '{"value": {"os.system": "x"}}',
        '{"value": {"int": 3}}',
        '{"value": {"complex": [1, 2, 3]}}',
        '{"value": {"list": 1}}',
    ],
)
def test_what_is_no_answer_is_refused(line):
    with pytest.raises(ValueError):
        answered(line)


@pytest.mark.parametrize("kind", ["deep", "long"])
def test_what_is_too_large_to_read_is_refused(kind):
    content = '{"list": [' * 5000 + "]}" * 5000 if kind == "deep" else "9" * 5000
    with pytest.raises(ValueError):
        answered(f'{{"value": {content}}}')
