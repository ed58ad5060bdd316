"""Judges whether a program passes its tests.

Expected values stay in this process, or go to a second sandbox without the program. That sandbox parses the answers, so that a
hostile answer costs this process no more than its length.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from attrs import frozen

from rlcore_code import questions
from rlcore_code.cases import AssertCase, Cases, ValueCase
from rlcore_code.questions import pack
from rlcore_code.sandbox import Execution, Sandbox

SCRIPT = Path(questions.__file__).read_text(encoding="utf-8")

VALUE = '{"value": '
OBJECT = '{"object": '
"""Beginning of an answer, or of a part of it, that is no plain data."""


@frozen(kw_only=True)
class Verdict:
    """The number of tests that a program passed, whether its time ran out, and whether an answer was no plain data."""

    num_passed: int
    timed_out: bool
    answered_object: bool
    is_lost: bool = False
    """True where a sandbox did not end in time, so that nobody knows what the program would have passed."""


class Judge:
    """Judges one program within `wall_time_s`."""

    def __init__(self, sandbox: Sandbox, wall_time_s: float, *, to_the_end: bool) -> None:
        self._sandbox = sandbox
        self._deadline = monotonic() + wall_time_s
        self._to_the_end = to_the_end
        self._timed_out = self._is_lost = False
        self._answered_object = False

    async def judge(self, program: str, cases: Cases) -> Verdict:
        """Run the tests up to the first that fails, or all of them with `to_the_end`."""
        passed = []
        for case in cases.streams:
            execution = await self._run({"main.py": program}, case.input)
            passed.append(execution.exit_code == 0 and is_same_output(execution.output, case.output))
            if not (passed[-1] or self._to_the_end):
                break
        if (cases.values or cases.asserts) and (all(passed) or self._to_the_end):
            passed += await self._judge_functions(program, cases)
        return Verdict(
            num_passed=sum(passed),
            timed_out=self._timed_out,
            answered_object=self._answered_object,
            is_lost=self._is_lost,
        )

    async def _judge_functions(self, program: str, cases: Cases) -> list[bool]:
        tests = [*cases.values, *cases.asserts]
        asked = [question for test in tests for question in test.questions]
        request = json.dumps({"sources": [cases.given_setup, program], "questions": asked})
        answers = iter(await self._lines({"main.py": SCRIPT, "request.json": request}, len(asked)))
        answered = [[next(answers) for _ in test.questions] for test in tests]
        self._answered_object = any(OBJECT in line for lines in answered for line in lines)
        verdicts = [_verdict(test, lines) for test, lines in zip(tests, answered, strict=True)]
        if not self._to_the_end and False in verdicts:
            verdicts = verdicts[: verdicts.index(False) + 1]
        open_tests = [number for number, verdict in enumerate(verdicts) if verdict is None]
        if open_tests:
            judged = [{"lines": answered[number], **_expected(tests[number])} for number in open_tests]
            request = json.dumps({"setup": cases.setup, "cases": judged})
            for number, line in zip(open_tests, await self._lines({"main.py": SCRIPT}, len(open_tests), request), strict=True):
                verdicts[number] = line == "true"
        return [verdict is True for verdict in verdicts]

    async def _lines(self, files: dict[str, str], number: int, stdin: str = "") -> list[str]:
        """Return the first `number` lines of the output; a missing line is empty."""
        execution = await self._run(files, stdin)
        lines = execution.output.decode(errors="replace").split("\n")
        return (lines[:-1] + [""] * number)[:number]  # the last part has no line end: it was cut off

    async def _run(self, files: dict[str, str], stdin: str) -> Execution:
        left_s = self._deadline - monotonic()
        if left_s <= 0:
            self._timed_out = True
            return Execution(output=b"", exit_code=None, timed_out=True)
        execution = await self._sandbox.run(files, stdin=stdin, wall_time_s=left_s)
        self._timed_out |= execution.timed_out
        self._is_lost |= execution.is_lost
        return execution


def is_same_output(found: bytes, expected: str) -> bool:
    """Compare outputs by lines, without white space at line ends and empty lines at the end."""
    return _lines(found.decode(errors="replace")) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _verdict(test: ValueCase | AssertCase, lines: Sequence[str]) -> bool | None:
    """Return the verdict that needs no parsing: False for a missing answer or an error, True for the expected text, or None."""
    if not all(line.startswith(VALUE) for line in lines):
        return False
    if isinstance(test, ValueCase) and lines[0] == json.dumps({"value": pack(test.expected)}):
        return True
    return None


def _expected(test: ValueCase | AssertCase) -> dict[str, Any]:
    """Return the part of a test that the judging sandbox receives."""
    if isinstance(test, ValueCase):
        return {"expected": pack(test.expected), "is_json": test.is_json}
    return {"condition": test.condition, "modules": test.modules}
