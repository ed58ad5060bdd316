"""Asks a program for values, and judges its answers. It is the script that runs inside a sandbox.

It imports the standard library alone. In the program's sandbox it writes one line of JSON for each question. In a second
sandbox, without the program, it parses the answers and judges them. The trainer parses no answer.
"""

import json
import math
import os
import sys
import types
from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from typing import Any

MAX_JSON_INT = 2**63
"""Larger numbers are hexadecimal text, whose length Python does not limit."""

MAX_ITEMS = 100_000
"""Most items of an iterator that are answered: it may have no end."""
_VALUES = {
    ("collections", "deque"): lambda value: [[*value]],
    ("decimal", "Decimal"): lambda value: [str(value)],
    ("fractions", "Fraction"): lambda value: [value.numerator, value.denominator],
    ("datetime", "date"): lambda value: [value.year, value.month, value.day],
    ("datetime", "time"): lambda value: [value.hour, value.minute, value.second, value.microsecond],
    ("datetime", "datetime"): lambda value: [*value.timetuple()[:6], value.microsecond],
    ("datetime", "timedelta"): lambda value: [value.days, value.seconds, value.microseconds],
}
"""The arguments that make a value of each of these classes of the standard library, none of which is imported for it."""
_VIEWS = ((type({}.keys()), "keys"), (type({}.values()), "values"), (type({}.items()), "items"))


def pack(value: Any) -> Any:
    """Return a value in types of JSON, with numpy's arrays as lists and the first MAX_ITEMS of an iterator.

    Of any other object it holds the class's name, whether it is true, and whether it can be called.
    """
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < MAX_JSON_INT else {"int": hex(value)}
    if isinstance(value, dict):
        return {"dict": [[pack(key), pack(item)] for key, item in value.items()]}
    for kind, name in ((list, "list"), (tuple, "tuple"), ((set, frozenset), "set")):
        if isinstance(value, kind):
            return {name: [pack(item) for item in value]}
    for kind, name in _VIEWS:
        if isinstance(value, kind):
            return {name: [pack(item) for item in value]}
    if isinstance(value, Iterator):
        return {"iterator": [pack(item) for item in islice(value, MAX_ITEMS)]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.hex()}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return pack(value.tolist())
    if (made := _VALUES.get((type(value).__module__, type(value).__name__))) and getattr(value, "tzinfo", None) is None:
        return {"value": [type(value).__module__, type(value).__name__, [pack(one) for one in made(value)]]}
    return {"object": [type(value).__name__, bool(value), callable(value)]}


class Opaque:
    """Stands for an object of the program, which has no value in another process: comparing it is an error."""

    is_true = True

    def __bool__(self) -> bool:
        return self.is_true

    def __eq__(self, other: object) -> bool:
        if other is None:
            return False
        raise TypeError("an object of another process is compared")

    __hash__ = None  # type: ignore[assignment]


def _opaque(name: str, is_true: bool, is_callable: bool) -> Opaque:
    methods = {"is_true": is_true, **({"__call__": lambda self: _refuse(self)} if is_callable else {})}
    return type(name, (Opaque,), methods)()


def unpack(packed: Any) -> Any:
    """Return the value that `pack` packed. ValueError, TypeError or RecursionError for any other."""
    if not isinstance(packed, dict):
        if isinstance(packed, list):
            raise ValueError("a list without its type")
        return packed
    [(name, content)] = packed.items()
    if name == "dict":
        return {unpack(key): unpack(item) for key, item in content}
    if name == "int":
        return int(content, 16)
    if name in ("complex", "range"):
        return {"complex": complex, "range": range}[name](*content)
    if name == "values":
        return dict(enumerate(map(unpack, content))).values()
    if name == "keys":
        return dict.fromkeys(map(unpack, content)).keys()
    if name == "items":
        return dict(map(unpack, content)).items()
    if name == "bytes":
        return bytes.fromhex(content)
    if name == "object":
        return _opaque(*content)
    if name == "value":
        module, kind, arguments = content
        return getattr(import_module(module), kind)(*map(unpack, arguments)) if (module, kind) in _VALUES else _refuse(content)
    return {"list": list, "tuple": tuple, "set": frozenset, "iterator": iter}[name](map(unpack, content))


def main() -> None:
    """Run the program in request.json and answer its questions; without that file judge the cases on standard input."""
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
    """Run the program and yield its value of each expression, or the error that it raised."""
    module = sys.modules["program"] = types.ModuleType("program")
    for source in sources:
        exec(compile(source, "program.py", "exec"), module.__dict__)
    for question in questions:
        try:
            yield {"value": pack(eval(question, module.__dict__))}
        except BaseException as error:
            yield {"error": type(error).__name__}


def is_right(case: dict, setup: str) -> bool:
    """Return whether the answers to a case are right; one that cannot be parsed is not."""
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
    """Return a value as JSON would hold it: tuples become lists, keys become texts. ValueError where it has no JSON form."""
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return json.loads(json.dumps(value, default=_refuse))
    if not (value is None or isinstance(value, (bool, int, float, str))) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        return _refuse(value)
    return value


def _refuse(value: Any) -> Any:
    raise ValueError(f"JSON has no {type(value).__name__}")


if __name__ == "__main__":
    main()
