"""Values as JSON, and what a program may send in their place."""

import json
from collections import deque
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore_code.judge import OBJECT
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


VALUES = [
    *(Fraction(1, 3), Decimal("1.10"), date(2024, 2, 29), time(1, 2), datetime(2024, 2, 29, 1, 2, 3, 4), timedelta(-1, 5)),
    deque([1, "a"]),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_of_the_standard_library_come_back(value):
    found = unpack(json.loads(json.dumps(pack(value))))
    assert found == value
    assert type(found) is type(value)


class Node:
    def __init__(self, items=()):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __eq__(self, other):
        return True

    __hash__ = None


@pytest.mark.parametrize(
    ("condition", "right"),
    [
        ("_0 is not None and _0 != None", (True, True, True)),
        ("_0", (False, True, True)),
        ("not _0", (True, False, False)),
        ("callable(_0)", (False, False, True)),
        ("type(_0).__name__ == 'Node'", (True, True, False)),
        *(
            (text, (False, False, False))
            for text in ("_0 == 3", "_0 != 3", "_0 in [3]", "[_0] == [3]", "_0 in {3}", "_0.items")
        ),
        ("len(_0) == 0", (False, False, False)),
    ],
)
def test_of_an_object_its_truth_is_known_and_no_value(condition, right):
    for value, expected in zip((Node(), Node([1]), Node.__len__), right, strict=True):
        line = json.dumps({"value": pack(value)})
        assert OBJECT in line
        assert is_right({"lines": [line], "condition": condition, "modules": []}, "") is expected


@pytest.mark.parametrize("value", [object(), [object()], {1: len}, datetime(2024, 1, 1, tzinfo=UTC)])
def test_objects_are_seen_at_any_depth(value):
    assert OBJECT in json.dumps(pack(value))
    assert OBJECT not in json.dumps(pack(OBJECT))


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
        '{"value": {"object": [1, true, true]}}',
        '{"value": {"value": ["os", "system", ["true"]]}}',
        '{"value": {"value": ["fractions", "Fraction", [1, 0]]}}',
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
        (Fraction(3), 3, True, False),
        (Fraction(3), 3, False, True),
    ],
)
def test_values_are_compared_as_python_or_json_has_them(value, expected, is_json, right):
    line = json.dumps({"value": pack(value)})
    assert is_right({"lines": [line], "expected": pack(expected), "is_json": is_json}, "") is right
