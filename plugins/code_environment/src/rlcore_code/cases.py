"""Reads the tests of a row: inputs and questions for the program, and the expected values, which its sandbox never sees."""

import ast
import builtins
import json
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from attrs import frozen

from rlcore.reading import parse_json
from rlcore.spi import DataError, Row
from rlcore_code.conditions import CALLERS, Callers, Questions, bound_by, called_by, calling, defined_by, names_of
from rlcore_code.config import CodeConfig
from rlcore_code.questions import pack

FORMS = '{"input": text, "output": text}, {"call": name, "arguments": [...], "result": value} or "assert f(2) == 4"'
NO_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)
"""Errors that Python raises for a text that is no Python."""


@frozen(kw_only=True)
class StreamCase:
    """A program's standard input, and the expected output."""

    input: str
    output: str


@frozen(kw_only=True)
class ValueCase:
    """A question to the program, and the expected value."""

    question: str
    expected: Any
    is_json: bool
    """True where `expected` comes from JSON, which has no tuples and sets and whose keys are texts."""

    @property
    def questions(self) -> tuple[str]:
        """The one question."""
        return (self.question,)


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
    given_setup: str = ""
    """The setup that the program runs. It lacks helpers that only conditions name, since these may hold expected values."""

    def __len__(self) -> int:
        return len(self.streams) + len(self.values) + len(self.asserts)


def read_cases(row: Row, config: CodeConfig) -> Cases:
    """Return the tests of a row. DataError names all of their problems."""
    name = config.tests_field
    tests = _of_text(row.get(name), "[")
    if not isinstance(tests, Sequence) or isinstance(tests, str) or not tests:
        found = f"{tests!r:.80}" if name in row else f"only the fields {', '.join(map(repr, row))}"
        raise DataError(f"environment.code.tests_field: found {found}; expected in the row's field {name!r} a list of {FORMS}")
    setup, problems = _read_setup(row, config)
    known, callers = _known_names(setup), CALLERS | calling(setup)
    functions = called_by([setup, *(test for test in tests if isinstance(test, str))]) - known
    cases = []
    for index, test in enumerate(tests):
        try:
            cases.append(_read_case(test, known, callers, functions))
        except (ValueError, RecursionError) as error:  # also of values that are too deep to be shown
            problems.append(f"{name}[{index}]: {error}")
    if problems:
        raise DataError("\n".join([f"found {len(problems)} problem(s) with the tests of a row:", *problems]))
    groups = {kind: tuple(case for case in cases if isinstance(case, kind)) for kind in (StreamCase, ValueCase, AssertCase)}
    given = given_setup(setup, [*groups[ValueCase], *groups[AssertCase]])
    return Cases(
        streams=groups[StreamCase], values=groups[ValueCase], asserts=groups[AssertCase], setup=setup, given_setup=given
    )


def _read_setup(row: Row, config: CodeConfig) -> tuple[str, list[str]]:
    setup = row.get(config.setup_field) or ""
    lines = [setup] if isinstance(setup, str) else setup
    if not isinstance(lines, Sequence) or not all(isinstance(line, str) for line in lines):
        return "", [f"{config.setup_field}: found {setup!r:.80}; expected Python code, a text or a list of texts"]
    code = "\n".join(lines)
    try:
        ast.parse(code)
    except NO_PYTHON as error:
        return "", [f"{config.setup_field}: found {code!r:.80}, which is no Python: {error}"]
    return code, []


def _known_names(setup: str) -> set[str]:
    """Return the names that the program does not define: Python's, and the setup's."""
    return set(dir(builtins)).union(*map(defined_by, ast.walk(ast.parse(setup))))


def given_setup(setup: str, tests: Sequence[ValueCase | AssertCase]) -> str:
    """Return the setup without the definitions that conditions name and no question does.

    It also lacks the definitions that these need alone, and the statements that use or change what is left out.
    """
    statements = [part for statement in ast.parse(setup).body for part in _parts(statement)]
    imported = set(dir(builtins)).union(*map(defined_by, filter(_is_import, statements)))
    used = [names_of(statement) for statement in statements]
    changed = [_changed(statement) - imported for statement in statements]

    def reached(names: set[str], *, backwards: bool = True) -> set[int]:
        found: set[int] = set()
        while new := {number for number, own in enumerate(changed if backwards else used) if own & names} - found:
            found |= new
            names = names.union(*((used if backwards else changed)[number] for number in new))
        return found

    def named(expressions: Iterable[str]) -> set[str]:
        return set().union(*(names_of(ast.parse(text)) for text in expressions))

    asked = reached(named(question for test in tests for question in test.questions))
    hidden = reached(named(test.condition for test in tests if isinstance(test, AssertCase))) - asked
    gone = set().union(*(changed[number] for number in hidden)).difference(*(changed[number] for number in asked))
    hidden |= reached(gone, backwards=False) - asked
    kept = [one for number, one in enumerate(statements) if number not in hidden or _is_import(one)]
    return setup if len(kept) == len(statements) else "\n".join(map(ast.unparse, kept))


def _is_import(node: ast.AST) -> bool:
    return isinstance(node, (ast.Import, ast.ImportFrom))


def _parts(statement: ast.stmt) -> list[ast.stmt]:
    """Split an assignment of literals to several names into one for each name."""
    match statement:
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)) if len(names) == len(values):
            if all(isinstance(name, ast.Name) for name in names) and not names_of(statement.value):
                pairs = zip(names, values, strict=True)
                return [ast.fix_missing_locations(ast.Assign(targets=[name], value=value, lineno=1)) for name, value in pairs]
    return [statement]


def _changed(statement: ast.stmt) -> set[str]:
    """Return the names that a statement may rebind, or whose objects it may change."""
    defined: set[str] = set().union(*map(defined_by, ast.walk(statement)))
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets) if all(isinstance(target, (ast.Name, ast.Tuple, ast.List)) for target in targets):
            return defined
    return defined if _is_import(statement) else defined | names_of(statement)


def _of_text(value: Any, opening: str) -> Any:
    """Parse JSON text, in which tables hold values of mixed forms; return any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith(opening):
        return value
    try:
        return parse_json(value)
    except ValueError:
        return value  # _read_case refuses it


def _read_case(test: Any, known: set[str], callers: Callers, functions: Container[str]) -> StreamCase | ValueCase | AssertCase:
    test = _of_text(test, "{")
    if isinstance(test, str):
        return _read_assert(test, known, callers, functions)
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
        # Python's parser, which reads the question, allows fewer levels than a row may have.
        given = [repr(parse_json(json.dumps(argument, allow_nan=False))) for argument in arguments]
        parse_json(json.dumps(test["result"], allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"found {dict(test)!r:.80}, which is no JSON: {error}") from error
    return ValueCase(question=f"{name}({', '.join(given)})", expected=test["result"], is_json=True)


def _read_assert(text: str, known: set[str], callers: Callers, functions: Container[str]) -> ValueCase | AssertCase:
    try:
        [statement] = ast.parse(text.strip()).body
    except NO_PYTHON as error:
        raise ValueError(f"found {text!r:.80}; expected one statement of Python, assert CONDITION ({error})") from error
    if not isinstance(statement, ast.Assert):
        raise ValueError(f"found {text!r:.80}; expected assert CONDITION")
    split = Questions(known, bound_by(statement.test))
    split.look_at_truth(statement.test)
    split.look_at_comparisons(statement.test)
    if function := split.handed_over(statement.test, callers, functions):
        expected = f"calls of {function} in the condition itself: the sandbox returns plain data, and no function or class"
        raise ValueError(f"found {text!r:.80}, where {function} stands without a call; expected {expected}")
    condition = split.visit(statement.test)
    if split.judges_itself:
        expected = (
            "a comparison with plain data, or a helper or class that the setup defines or imports: the program would be shown "
            "what is right, and would judge itself"
        )
        raise ValueError(f"found {text!r:.80}, where {split.judges_itself} is the program's; expected {expected}")
    if not split.questions or split.is_bound:
        raise ValueError(f"found {text!r:.80}; expected calls of the program's functions, outside comprehensions and lambdas")
    try:
        compile(ast.unparse(condition), "condition", "eval")
    except SyntaxError as error:
        raise ValueError(f"found {text!r:.80}; expected a condition that stands outside of functions ({error})") from error
    match condition:
        case ast.Compare(left=ast.Name(id="_0"), ops=[ast.Eq()], comparators=[right]) if len(split.questions) == 1:
            try:
                expected = ast.literal_eval(right)
                pack(expected)
                return ValueCase(question=split.questions[0], expected=expected, is_json=False)
            except (ValueError, TypeError):
                pass  # no literal: the judging sandbox evaluates the expression
    return AssertCase(questions=tuple(split.questions), condition=ast.unparse(condition), modules=tuple(sorted(split.modules)))
