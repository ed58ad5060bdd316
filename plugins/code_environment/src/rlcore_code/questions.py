"""Questions to a program, which it answers by values, and verdicts on its answers.

Inside a sandbox this module is the script that runs, so that it imports the standard library alone. With the program it answers
the questions, a line of JSON for each with no judgement of it. In another sandbox, without the program, it reads the answers
and judges them. The trainer reads no answer.
"""

import json
import math
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

MAX_JSON_INT = 2**63
"""Larger numbers are hexadecimal text, whose length Python does not limit."""


def pack(value: Any) -> Any:
    """The value in types of JSON; numpy's arrays are lists. TypeError where it holds anything but plain data."""
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < MAX_JSON_INT else {"int": hex(value)}
    if isinstance(value, dict):
        return {"dict": [[pack(key), pack(item)] for key, item in value.items()]}
    for kind, name in ((list, "list"), (tuple, "tuple"), ((set, frozenset), "set")):
        if isinstance(value, kind):
            return {name: [pack(item) for item in value]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.hex()}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return pack(value.tolist())
    raise TypeError(f"a {type(value).__name__} is no plain data")


def unpack(packed: Any) -> Any:
    """The value that was packed. ValueError, TypeError or RecursionError where none was."""
    if not isinstance(packed, dict):
        if isinstance(packed, list):
            raise ValueError("a list without its type")
        return packed
    [(name, content)] = packed.items()
    if name == "dict":
        return {unpack(key): unpack(item) for key, item in content}
    if name == "int":
        return int(content, 16)
    if name == "complex":
        return complex(*content)
    if name == "bytes":
        return bytes.fromhex(content)
    return {"list": list, "tuple": tuple, "set": frozenset}[name](map(unpack, content))


def main() -> None:
    """Judge what standard input holds, or else run the program in request.json and answer the questions there."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
    if os.path.exists("request.json"):
        with open("request.json", encoding="utf-8") as file:
            request = json.load(file)
        lines = (json.dumps(line) for line in answers(request["sources"], request["questions"]))
    else:
        judged = json.load(sys.stdin)
        lines = (json.dumps(is_right(case, judged["setup"])) for case in judged["cases"])
    for line in lines:
        print(line, file=channel, flush=True)
    os._exit(0)  # whatever threads the program has started


def answers(sources: list[str], questions: list[str]) -> Iterator[dict]:
    """The program's value of each expression, or the error that it raised."""
    module = sys.modules["program"] = types.ModuleType("program")
    for source in sources:
        exec(compile(source, "program.py", "exec"), module.__dict__)
    for question in questions:
        try:
            yield {"value": pack(eval(question, module.__dict__))}
        except BaseException as error:
            yield {"error": type(error).__name__}


def is_right(case: dict, setup: str) -> bool:
    """Whether lines of answers are what a case expects. What cannot be read is not."""
    try:
        values = [unpack(json.loads(line)["value"]) for line in case["lines"]]
        if "expected" in case:
            expected = unpack(case["expected"])
            return bool((as_json(values[0]) if case["is_json"] else values[0]) == expected)
        names = {f"_{number}": value for number, value in enumerate(values)}
        for name in case["modules"]:
            exec(f"import {name}", names)
        exec(compile(setup, "setup.py", "exec"), names)
        return bool(eval(case["condition"], names))
    except BaseException:  # such as a comparison of a number with a text, or a setup that exits
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


if __name__ == "__main__":
    main()
