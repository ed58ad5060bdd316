"""Values behind KEY=, as hydra's grammar has them."""

import math
from typing import Any

import pytest

from rlcore_import.override_values import value_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("null", None),
        ("NULL", None),
        ("None", "None"),
        ("True", True),
        ("on", "on"),
        ("yes", "yes"),
        ("1_000", 1000),
        ("+1", 1),
        ("010", "010"),
        ("0x10", "0x10"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("1e-6", 1e-6),
        (".5", 0.5),
        ("inf", math.inf),
        (".inf", math.inf),
        ("-inf", -math.inf),
        ("int(3.7)", 3),
        ("str(3)", "3"),
        ("str(true)", "true"),
        ("bool(false)", False),
        ("float(x)", "float(x)"),
        ("b c", "b c"),
        ("'8'", "8"),
        ('"x, y"', "x, y"),
        (r"'it\'s'", "it's"),
        (r"'a\b\\'", "a\\b\\"),
        (r"'a\\\'b'", "a\\'b"),
        (r"a\,b", "a,b"),
        ("x#c", "x#c"),
        ("[]", []),
        ("[1,2,abc]", [1, 2, "abc"]),
        ("[ a b , 'c d' ]", ["a b", "c d"]),
        ("[[1],[2,3]]", [[1], [2, 3]]),
        ("[/a/x.parquet,'/b/y.parquet']", ["/a/x.parquet", "/b/y.parquet"]),
        ("{}", {}),
        ("{k:1,m:[x,y]}", {"k": 1, "m": ["x", "y"]}),
        ("{k: 1, 'm': {n: null}}", {"k": 1, "m": {"n": None}}),
        ("{k:a:b}", {"k": "a:b"}),
        ("{k:${x.y},m:${oc.env:A,1}}", {"k": "${x.y}", "m": "${oc.env:A,1}"}),
        ("${a.b}", "${a.b}"),
        ("a=b", "a=b"),
        ("[1,2", "[1,2"),
        ("{k}", "{k}"),
        ("'a' b", "'a' b"),
        ("int([1])", "int([1])"),
    ],
)
def test_values_are_hydras(text: str, expected: Any) -> None:
    found = value_of(text)
    assert (found, type(found)) == (expected, type(expected))
