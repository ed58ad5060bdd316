"""The tests of a row, read once: what a program is given, and what it has to come to. Only the first goes into the sandbox."""

import ast
import builtins
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from rlcore.spi import DataError, Row
from rlcore_code.config import CodeConfig

FORMS = '{"input": text, "output": text}, {"call": name, "arguments": [...], "result": value} or "assert f(2) == 4"'
_SCOPES = (ast.Lambda, ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp, ast.NamedExpr)


@frozen(kw_only=True)
class StreamCase:
    """A program's standard input, and the output that is right."""

    input: str
    output: str


@frozen(kw_only=True)
class ValueCase:
    """A question to the program, and the value that is right."""

    question: str
    expected: Any
    is_json: bool
    """Whether `expected` comes from JSON, which has no tuples and sets and whose keys are texts."""


@frozen(kw_only=True)
class AssertCase:
    """Questions to the program, and an expression of their answers `_0`, `_1` that has to be true."""

    questions: tuple[str, ...]
    condition: str
    modules: tuple[str, ...] = ()
    """Modules of the standard library that the condition names."""


@frozen(kw_only=True)
class Cases:
    """All tests of a row."""

    streams: tuple[StreamCase, ...] = ()
    values: tuple[ValueCase, ...] = ()
    asserts: tuple[AssertCase, ...] = ()
    setup: str = ""

    def __len__(self) -> int:
        return len(self.streams) + len(self.values) + len(self.asserts)


def read_cases(row: Row, config: CodeConfig) -> Cases:
    """The tests of a row; DataError names everything that is wrong with them."""
    name = config.tests_field
    tests = _of_text(row.get(name), "[")
    if not isinstance(tests, Sequence) or isinstance(tests, str) or not tests:
        found = f"{tests!r:.80}" if name in row else f"only the fields {', '.join(map(repr, row))}"
        raise DataError(f"environment.code.tests_field: found {found}; expected in the row's field {name!r} a list of {FORMS}")
    setup, problems = _read_setup(row, config)
    known = _known_names(setup)
    cases = []
    for index, test in enumerate(tests):
        try:
            cases.append(_read_case(test, known))
        except ValueError as error:
            problems.append(f"{name}[{index}]: {error}")
    if problems:
        raise DataError("\n".join([f"found {len(problems)} problem(s) with the tests of a row:", *problems]))
    groups = {kind: tuple(case for case in cases if isinstance(case, kind)) for kind in (StreamCase, ValueCase, AssertCase)}
    return Cases(streams=groups[StreamCase], values=groups[ValueCase], asserts=groups[AssertCase], setup=setup)


def _read_setup(row: Row, config: CodeConfig) -> tuple[str, list[str]]:
    setup = row.get(config.setup_field) or ""
    lines = [setup] if isinstance(setup, str) else setup
    if not isinstance(lines, Sequence) or not all(isinstance(line, str) for line in lines):
        return "", [f"{config.setup_field}: found {setup!r:.80}; expected Python code, a text or a list of texts"]
    code = "\n".join(lines)
    try:
        ast.parse(code)
    except (SyntaxError, ValueError) as error:
        return "", [f"{config.setup_field}: found {code!r:.80}, which is no Python: {error}"]
    return code, []


def _known_names(setup: str) -> set[str]:
    """Names that are not the program's: Python's, and what the setup defines."""
    known = set(dir(builtins))
    for node in ast.walk(ast.parse(setup)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            known.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            known.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            known.add(node.id)
    return known


def _of_text(value: Any, opening: str) -> Any:
    """What JSON text holds, as tables write values of mixed forms; any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(opening):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value  # which is then no test


def _read_case(test: Any, known: set[str]) -> StreamCase | ValueCase | AssertCase:
    test = _of_text(test, "{")
    if isinstance(test, str):
        return _read_assert(test, known)
    fields = {name for name, value in test.items() if value is not None} if isinstance(test, Mapping) else set()
    if fields == {"input", "output"}:
        if not all(isinstance(test[name], str) for name in fields):
            raise ValueError(f"found {dict(test)!r:.80}; expected texts as input and output")
        return StreamCase(input=test["input"], output=test["output"])
    if fields | {"result"} == {"call", "arguments", "result"}:  # a table writes a result of null as no result
        return _read_call({"result": None, **test})
    raise ValueError(f"found {test!r:.80}; expected {FORMS}")


def _read_call(test: Mapping[str, Any]) -> ValueCase:
    name, arguments = test["call"], test["arguments"]
    if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"found the call {name!r:.80}; expected the name of a function")
    if not isinstance(arguments, Sequence) or isinstance(arguments, str):
        raise ValueError(f"found the arguments {arguments!r:.80}; expected a list of them, by position")
    try:
        given = [json.dumps(argument, allow_nan=False) for argument in arguments]
        json.dumps(test["result"], allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"found {dict(test)!r:.80}, which is no JSON: {error}") from error
    question = f"{name}({', '.join(repr(json.loads(text)) for text in given)})"
    return ValueCase(question=question, expected=test["result"], is_json=True)


def _read_assert(text: str, known: set[str]) -> ValueCase | AssertCase:
    try:
        [statement] = ast.parse(text.strip()).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"found {text!r:.80}; expected one statement of Python, assert CONDITION ({error})") from error
    if not isinstance(statement, ast.Assert):
        raise ValueError(f"found {text!r:.80}; expected assert CONDITION")
    split = _Questions(known)
    condition = split.visit(statement.test)
    if not split.questions or split.is_bound:
        raise ValueError(f"found {text!r:.80}; expected calls of the program's functions, outside comprehensions and lambdas")
    match condition:
        case ast.Compare(left=ast.Name(id="_0"), ops=[ast.Eq()], comparators=[right]) if len(split.questions) == 1:
            try:
                return ValueCase(question=split.questions[0], expected=ast.literal_eval(right), is_json=False)
            except ValueError:
                pass  # it is worked out beside the answers
    return AssertCase(questions=tuple(split.questions), condition=ast.unparse(condition), modules=tuple(sorted(split.modules)))


class _Questions(ast.NodeTransformer):
    """Puts `_0`, `_1` in place of what the program has to answer: the outermost calls that begin with a name of its own, and
    such names by themselves. The rest of a condition, with the values that are right, is not shown to the program."""

    def __init__(self, known: set[str]) -> None:
        self._known = known
        self._depth = 0
        self.questions: list[str] = []
        self.is_bound = False
        """Whether a question depends on a variable of the condition itself."""
        self.modules: set[str] = set()

    def visit(self, node: ast.AST) -> ast.AST:
        root, above = node, None
        while isinstance(root, (ast.Call, ast.Attribute, ast.Subscript)):
            root, above = root.func if isinstance(root, ast.Call) else root.value, root
        if isinstance(root, ast.Name) and isinstance(above, ast.Attribute) and root.id in sys.stdlib_module_names - self._known:
            self.modules.add(root.id)
            self._known = self._known | {root.id}
        if isinstance(node, ast.expr) and isinstance(root, ast.Name) and root.id not in self._known:
            self.is_bound |= self._depth > 0
            self.questions.append(ast.unparse(node))
            return ast.Name(id=f"_{len(self.questions) - 1}", ctx=ast.Load())
        self._depth += isinstance(node, _SCOPES)
        visited = self.generic_visit(node)
        self._depth -= isinstance(node, _SCOPES)
        return visited
