"""Objects as bytes: what is read is what was written, and nothing that the bytes name is run."""

import json
import pickle
from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from attrs import define, frozen

from rlcore_rollout.serialization import SerializationError, dumps, loads


class Colour(Enum):
    RED = "red"


@frozen(kw_only=True)
class Inner:
    value: Any
    _private: int = 3


@dataclass
class Record:
    name: str
    parts: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        CALLS.append(self.name)


@define
class Closing:
    path: str

    def __del__(self) -> None:
        CALLS.append(self.path)


CALLS: list[str] = []


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 0, -(2**80), 1.5, float("inf"), "text \udc80 \x00", b"", b"\x00\xff"),
        *([], (), {}, set(), frozenset({1, "a"}), [1, [2, (3, {"a": {4}})]], {(1, "a"): 2, None: 3}),
        *(datetime(2025, 1, 2, 3, 4, 5, 6, UTC), date(2025, 1, 2), time(3, 4), Decimal("1.10"), Fraction(1, 3), UUID(int=7)),
        *(Fraction(-7), timedelta(days=-1, microseconds=3), time(3, tzinfo=UTC)),
        *(Colour.RED, Inner(value=(Colour.RED, Inner(value=b"1", private=4))), Record("a", [Record("b")])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_read_is_what_was_written(value: Any) -> None:
    found = loads(dumps(value))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "float16", "<U3", "S2", "datetime64[s]", "complex64"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_arrays_keep_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    value = np.zeros(shape, dtype)
    found = loads(dumps([value, value, value.T]))
    assert found[0] is found[1]
    assert found[0].flags.writeable
    np.testing.assert_array_equal(found[2], value.T, strict=True)


def test_a_number_of_numpy_stays_one() -> None:
    assert type(loads(dumps(np.float32(1.5)))) is np.float32


class Plain:
    pass


def with_more() -> Record:
    value = Record("a")
    vars(value)["more"] = 1
    return value


def contains_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "value",
    [
        *(Plain(), Plain, with_more(), len, object(), OrderedDict(), np.zeros(1, object), Path("a"), Closing("kept")),
        *(np.ma.masked_array([1, 2], [0, 1]), np.zeros(2).view(np.recarray), datetime(2025, 1, 2, tzinfo=ZoneInfo("UTC"))),
        *({"a": [lambda: None]}, contains_itself(), type("Local", (Inner,), {})(value=1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_no_bytes_can_hold_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        dumps(value)


def written(nodes: list[Any], root: Any = None, data: bytes = b"") -> bytes:
    described = json.dumps([nodes, [len(nodes) - 1] if root is None else root, len(data)]).encode()
    return len(described).to_bytes(8, "little") + described + data


@pytest.mark.parametrize(
    "node",
    [
        *(["object", "os:system", {"command": "true"}], ["object", "builtins:eval", {}], ["enum", "os:environ", "HOME"]),
        *(["object", "subprocess:Popen", {"args": "true"}], ["object", "antigravity:fly", {}], ["object", "os.path:join", {}]),
        *(["object", f"{__name__}:Closing", {"path": "run"}], ["object", f"{__name__}:Record.__init__", {}]),
        *(
            ["object", f"{__name__}:Inner", {"value": 1}],
            ["object", f"{__name__}:Record", {"name": "a", "parts": 1, "more": 2}],
        ),
        *(["array", "O", [1], 0], ["array", "f4", [4], 0], ["dict", 1], ["set", [9]], ["tuple", [5]]),
        *(["number"], ["Decimal", "a"], ["Fraction", "1e999999999"], ["lambda", 1], ["enum", f"{__name__}:Colour", "BLUE"], []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_bytes_that_name_anything_but_data_are_refused(node: list[Any]) -> None:
    CALLS.clear()
    with pytest.raises(SerializationError):
        loads(written([node], data=bytes(8)))
    assert not CALLS


DOUBLED: list[list[Any]] = [["tuple"], *(["tuple", [place], [place]] for place in range(60))]
"""A tuple that holds another one twice, which holds another one twice: whoever hashes it takes years."""


@pytest.mark.parametrize(
    "nodes",
    [
        *([*DOUBLED, [kind, [60]]] for kind in ("set", "frozenset")),
        [*DOUBLED, ["dict", [60], 1]],
        [*DOUBLED, ["object", f"{__name__}:Record", {"name": [60], "parts": 1}], ["set", [61]]],
        [*DOUBLED[:26], *[["set", [25]]] * 3],
        [["bytes", 0, 8], ["bytes", 0, 8]],
        [["bytes", 4, 4]],
        [["bytes", 0, -1]],
        [["array", "f4", [2], 0], ["array", "f4", [2], 0]],
        [["array", "f4", [-1], 0]],
        [["array", "S0", [10**12], 0]],
        [["bytes", 0, 4], ["number", "f4", [], 0]],
    ],
    ids=lambda nodes: str(nodes[-1]),
)
def test_bytes_that_would_take_more_time_or_memory_than_their_own_length_are_refused(nodes: list[Any]) -> None:
    with pytest.raises(SerializationError):
        loads(written(nodes, data=bytes(8)))


def test_a_tuple_that_is_in_others_often_and_nowhere_hashed_is_read() -> None:
    assert len(loads(written([*DOUBLED, ["list", [60], [60]]]))) == 2


def test_reading_calls_nothing_of_a_class() -> None:
    data = dumps(Record("a"))
    CALLS.clear()
    assert loads(data) == Record.__new__(Record).__class__("a")
    assert CALLS == ["a"]  # the one to compare with


@pytest.mark.parametrize("kind", ["tuple", "list"])
def test_what_is_too_deep_for_a_hash_is_refused(kind: str) -> None:
    """A tuple within 10^5 others, hashed, would overflow the stack and end the process without a word."""
    nodes = [["tuple"], *([kind, [place]] for place in range(10**5)), ["set", [10**5]]]
    with pytest.raises(SerializationError, match="within each other"):
        loads(written(nodes))


GOOD = dumps({"a": np.arange(3), "b": [Inner(value=1), b"bytes"]})


@pytest.mark.parametrize("end", [0, 1, 7, 8, 9, len(GOOD) // 2, len(GOOD) - 1])
def test_truncated_bytes_are_refused(end: int) -> None:
    with pytest.raises(SerializationError):
        loads(GOOD[:end])


@pytest.mark.parametrize(
    "data", [pickle.dumps(1), GOOD + b"0", b"\xff" * 64, written([]), b"x" * 8, (10**6).to_bytes(8, "little") + b"[" * 10**6]
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(SerializationError):
        loads(data)
