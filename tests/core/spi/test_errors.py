"""Errors that list all that is wrong."""

import pytest

from rlcore.spi import BoundError, ConfigError, Problem, errors
from rlcore.spi.errors import ProblemsError, RlcoreError


def test_an_error_with_problems_lists_all_of_them():
    problems = [Problem(path="a", found="1", expected="2"), Problem(path="b", found="x", expected="y", remedy="Write y.")]
    error = ConfigError(problems)
    assert isinstance(error, RlcoreError)
    assert error.problems == tuple(problems)
    assert str(error).splitlines() == [
        "2 problem(s) in the recipe:",
        "  - a: found 1; expected 2",
        "  - b: found x; expected y. Write y.",
    ]


@pytest.mark.parametrize(
    ("paths", "summary"),
    [
        (["--step", "BUNDLE"], "2 problem(s) with the command line:"),
        (["--step", "run.num_steps"], "2 problem(s) in the recipe:"),
    ],
)
def test_problems_of_options_and_arguments_are_not_in_the_recipe(paths, summary):
    error = ConfigError([Problem(path=path, found="1", expected="2") for path in paths])
    assert str(error).splitlines()[0] == summary


def test_every_error_that_a_user_meets_has_an_exit_code_of_its_own():
    classes = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, RlcoreError)}
    codes = [value.exit_code for value in classes - {RlcoreError, ProblemsError}]
    assert len(set(codes)) == len(codes) > 10
    assert all(0 < code < 256 for code in codes)


def test_the_metrics_over_their_bounds_are_a_copy():
    metrics = {"kl": 2.0}
    error = BoundError("too far", metrics)
    metrics.clear()
    assert (str(error), error.metrics, BoundError("too far").metrics) == ("too far", {"kl": 2.0}, {})
