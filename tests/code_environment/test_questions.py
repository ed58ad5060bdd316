"""Values as JSON, and what a program may send in their place."""

import json
from fractions import Fraction
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore_code.questions import is_right, pack, unpack

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


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.array([[1, 2]]), [[1, 2]]),
        ([{np.int8(1): np.arange(2)}], [{1: [0, 1]}]),
    ],
)
def test_numbers_and_arrays_of_numpy_are_plain_data(value, plain):
    assert pack(value) == pack(plain)


@pytest.mark.parametrize("value", [{1: [2]}.keys(), {1: 2}.items(), range(1, 9, 2)], ids=repr)
def test_views_and_ranges_come_back(value):
    found = unpack(json.loads(json.dumps(pack(value))))
    assert found == value
    assert type(found) is type(value)


def test_iterators_come_back_without_their_end():
    assert list(unpack(pack({1: [2]}.values()))) == [[2]]
    assert next(unpack(pack(iter([3, 4])))) == 3
    assert next(unpack(pack(count()))) == 0


@pytest.mark.parametrize("value", [object(), [object()], {1: len}, Fraction(1, 3)])
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
def test_what_is_no_answer_is_wrong(line):
    assert not is_right({"lines": [line], "condition": "True", "modules": []}, "")


@pytest.mark.parametrize("kind", ["deep", "long"])
def test_what_is_too_large_to_read_is_wrong(kind):
    content = '{"list": [' * 5000 + "]}" * 5000 if kind == "deep" else "9" * 5000
    assert not is_right({"lines": [f'{{"value": {content}}}'], "condition": "True", "modules": []}, "")


@pytest.mark.parametrize(
    ("condition", "setup", "right"),
    [
        ("abs(_0 - 3) < 1e-6", "", True),
        ("math.isclose(_0, 3.0) and _0 > 2", "", True),
        ("near(_0)", "def near(value): return value == 3", True),
        ("_0 < 'a'", "", False),
        ("missing(_0)", "", False),
        ("_0 == 3", "raise SystemExit(0)", False),
    ],
)
def test_conditions_are_of_answers_and_the_setup(condition, setup, right):
    assert is_right({"lines": ['{"value": 3}'], "condition": condition, "modules": ["math"]}, setup) is right


@pytest.mark.parametrize(
    ("value", "expected", "is_json", "right"),
    [
        ((1, (2,)), [1, [2]], True, True),
        ({1: "a"}, {"1": "a"}, True, True),
        ({1}, [1], True, False),
        (float("nan"), None, True, False),
        ((1, 2), [1, 2], False, False),
        ({1, 2}, {2, 1}, False, True),
        (b"x", b"x", False, True),
        ("3", 3, True, False),
    ],
)
def test_values_are_compared_as_python_or_json_has_them(value, expected, is_json, right):
    line = json.dumps({"value": pack(value)})
    assert is_right({"lines": [line], "expected": pack(expected), "is_json": is_json}, "") is right
