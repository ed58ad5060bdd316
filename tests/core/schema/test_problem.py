"""What is wrong, in one line each."""

import pytest

from rlcore.schema.problem import Problem, ProblemsError


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, "run.seed: found 1; expected 2"),
        ({"remedy": "Write 2."}, "run.seed: found 1; expected 2. Write 2."),
        ({"origin": "the command line"}, "run.seed: found 1, from the command line; expected 2"),
    ],
)
def test_a_problem_says_where_what_was_found_and_what_was_expected(more: dict[str, str], text: str) -> None:
    assert str(Problem(path="run.seed", found="1", expected="2", **more)) == text


def test_an_error_keeps_all_problems_and_counts_them() -> None:
    class Wrong(ProblemsError):
        summary = "things"

    problems = [Problem(path=path, found="1", expected="2") for path in "ab"]
    error = Wrong(problems)
    assert error.problems == tuple(problems)
    assert str(error) == "2 things:\n  - a: found 1; expected 2\n  - b: found 1; expected 2"
