"""Problems in recipes and other input of users, and the errors that list them."""

from collections.abc import Sequence
from typing import ClassVar

from attrs import frozen


@frozen(kw_only=True)
class Problem:
    """One thing that is wrong: where, what was found, what was expected, what to do."""

    path: str
    """The place of the problem: a recipe key such as `training.num_steps`, a file, a plugin's name."""
    found: str
    expected: str
    remedy: str = ""
    origin: str = ""
    """The origin of what was found, a file or "the command line"; "" where that goes without saying."""

    def __str__(self) -> str:
        found = f"{self.found}, from {self.origin}" if self.origin else self.found
        text = f"{self.path}: found {found}; expected {self.expected}"
        return f"{text}. {self.remedy}" if self.remedy else text


@frozen(kw_only=True)
class Note:
    """A warning about something that works all the same."""

    path: str
    """Its place, as of a Problem."""
    text: str
    """The finding and why it matters, without a full stop at its end."""

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


class RlcoreError(Exception):
    """Base of all errors that a user can act on; anything else that escapes is a defect of rlcore or of a plugin."""

    exit_code: ClassVar[int] = 1


class ProblemsError(RlcoreError):
    """An error that reports all its problems at once. Paths such as --step and BUNDLE are those of a command line."""

    summary: ClassVar[str] = "problems"

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        is_call = all(
            problem.path.startswith("--") or (problem.path.isalpha() and problem.path.isupper()) for problem in self.problems
        )
        summary = self.summary.replace("in the recipe", "with the command line") if is_call else self.summary
        super().__init__(f"{len(self.problems)} {summary}:\n{lines}")
