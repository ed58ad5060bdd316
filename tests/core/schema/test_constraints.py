"""Ranges: which numbers are inside, at their ends and beside them."""

import math

import pytest

from rlcore.schema.constraints import KNOWN_HOME, Constraint, above, above_at_most, at_least, at_least_below, between, not_empty


@pytest.mark.parametrize(
    ("constraint", "inside", "outside"),
    [
        (at_least(1), (1, 1.5, 1e300), (0, 0.999, -1, math.inf, math.nan)),
        (above(0), (1e-300, 1), (0, -1, math.inf, math.nan)),
        (between(0, 1), (0, 0.5, 1), (-1e-9, 1.001, math.nan)),
        (at_least_below(0, 1), (0, 0.999), (-1e-9, 1, math.nan)),
        (above_at_most(0, 1), (1e-9, 1), (0, 1.001, math.nan)),
        (KNOWN_HOME, ("~/x", "x"), ("~no-such-user", "~no-such-user/x")),
        (not_empty(), ("a", " a "), ("", " ", "\n\t")),
    ],
)
def test_what_is_inside_is_accepted_and_nothing_else(constraint: Constraint, inside: tuple, outside: tuple) -> None:
    assert [value for value in (*inside, *outside) if constraint.accepts(value)] == list(inside)


@pytest.mark.parametrize("make", [at_least, above])
def test_words_name_the_bound_and_a_remedy_is_kept(make) -> None:
    constraint = make(0.25, "Write more.")
    assert "0.25" in constraint.words
    assert constraint.remedy == "Write more."
