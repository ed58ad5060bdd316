"""Questions to a program: expressions, which it answers by values.

The trainer reads answers by `answered`. Inside the sandbox this module is the script that runs the program and asks it, so that
it imports the standard library alone. Its output is a line of JSON for each question, with the program's own answer and no
judgement of it.
"""

import json
import os
import sys
import types
from typing import Any

MAX_JSON_INT = 2**63
"""Larger numbers are hexadecimal text, whose length Python does not limit."""


def pack(value: Any) -> Any:
    """The value in types of JSON. TypeError where it holds anything but plain data."""
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


def answered(line: str) -> Any:
    """What a line of a program's answers holds; ValueError where it holds an error, or nothing that can be read."""
    try:
        return unpack(json.loads(line)["value"])
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError, MemoryError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def main() -> None:
    """Run the program in request.json, and answer the questions there."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
    with open("request.json", encoding="utf-8") as file:
        request = json.load(file)
    name = "program"
    module = sys.modules[name] = types.ModuleType(name)
    if "values" in request:
        module.__dict__.update((f"_{n}", unpack(value)) for n, value in enumerate(request["values"]))
    for source in request["sources"]:
        exec(compile(source, "program.py", "exec"), module.__dict__)
    for question in request["questions"]:
        print(json.dumps(answer(question, module.__dict__)), file=channel, flush=True)
    os._exit(0)  # whatever threads the program has started


def answer(question: str, names: dict) -> dict:
    """The value of an expression, or the error that it raised."""
    try:
        return {"value": pack(eval(question, names))}
    except BaseException as error:
        return {"error": type(error).__name__}


if __name__ == "__main__":
    main()
