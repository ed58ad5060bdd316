"""Whether a program passes its tests. Values that are right stay in this process, or go to one that runs no program."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from attrs import frozen

from rlcore_code import questions
from rlcore_code.cases import AssertCase, Cases, ValueCase
from rlcore_code.questions import answered, pack
from rlcore_code.sandbox import Execution, Sandbox

ASKING = Path(questions.__file__).read_text(encoding="utf-8")


@frozen(kw_only=True)
class Verdict:
    """How many tests a program has passed, and whether its time ran out."""

    num_passed: int
    timed_out: bool


class Judge:
    """Judges one program: everything that it does takes `wall_time_s` at most."""

    def __init__(self, sandbox: Sandbox, wall_time_s: float, *, to_the_end: bool) -> None:
        self._sandbox = sandbox
        self._deadline = monotonic() + wall_time_s
        self._to_the_end = to_the_end
        self._timed_out = False

    async def judge(self, program: str, cases: Cases) -> Verdict:
        """Run the tests; with `to_the_end` also those behind one that fails."""
        passed = []
        for case in cases.streams:
            execution = await self._run({"main.py": program, "stdin": case.input})
            passed.append(execution.exit_code == 0 and is_same_output(execution.output, case.output))
            if not (passed[-1] or self._to_the_end):
                break
        if (cases.values or cases.asserts) and (all(passed) or self._to_the_end):
            passed += await self._judge_functions(program, cases)
        return Verdict(num_passed=sum(passed), timed_out=self._timed_out)

    async def _judge_functions(self, program: str, cases: Cases) -> list[bool]:
        asked = [case.question for case in cases.values]
        asked += [question for case in cases.asserts for question in case.questions]
        answers = iter(await self._answers([cases.setup, program], asked))
        passed = [is_right(next(answers), case) for case in cases.values]
        given = [[next(answers) for _ in case.questions] for case in cases.asserts]
        for case, lines in zip(cases.asserts, given, strict=True):
            if not (all(passed) or self._to_the_end):
                break
            passed.append(await self._holds(case, lines, cases.setup))
        return passed

    async def _answers(self, sources: list[str], asked: list[str], values: Sequence[Any] = ()) -> list[str]:
        """A line for each question, empty where none came."""
        request = {"sources": sources, "questions": asked, "values": list(values)}
        execution = await self._run({"main.py": ASKING, "request.json": json.dumps(request)})
        lines = execution.output.decode(errors="replace").split("\n")
        return (lines + [""] * len(asked))[: len(asked)]

    async def _holds(self, case: AssertCase, lines: Sequence[str], setup: str) -> bool:
        """Whether the condition of an assert is true of the answers, in a process without the program."""
        try:
            values = [pack(answered(line)) for line in lines]
        except (ValueError, TypeError, RecursionError):
            return False
        imports = "\n".join(f"import {name}" for name in case.modules)
        [line] = await self._answers([imports, setup], [f"bool({case.condition})"], values)
        try:
            return answered(line) is True
        except ValueError:  # such as a comparison of a number with a text
            return False

    async def _run(self, files: dict[str, str]) -> Execution:
        left_s = self._deadline - monotonic()
        if left_s <= 0:
            self._timed_out = True
            return Execution(output=b"", exit_code=None, timed_out=True)
        execution = await self._sandbox.run(files, wall_time_s=left_s)
        self._timed_out |= execution.timed_out
        return execution


def is_same_output(found: bytes, expected: str) -> bool:
    """Line by line, but for white space at the ends of lines and empty lines at the end."""
    return _lines(found.decode(errors="replace")) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def is_right(line: str, case: ValueCase) -> bool:
    """Whether a program's answer is the value expected."""
    try:
        value = answered(line)
        return bool((as_json(value) if case.is_json else value) == case.expected)
    except (ValueError, TypeError, RecursionError):
        return False


def as_json(value: Any) -> Any:
    """What JSON makes of it: tuples are lists, and keys texts. ValueError where it makes nothing of it."""
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return json.loads(json.dumps(value, default=_refuse))
    if isinstance(value, (frozenset, bytes, complex)) or (isinstance(value, float) and not math.isfinite(value)):
        return _refuse(value)
    return value


def _refuse(value: Any) -> Any:
    raise ValueError(f"JSON has no {type(value).__name__}")
