"""Reads the tests of a row: inputs and questions for the program, and the expected values, which its sandbox never sees."""

import ast
import builtins
import json
import re
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from rlcore.spi import DataError, Row
from rlcore_code.config import CodeConfig
from rlcore_code.questions import pack

FORMS = '{"input": text, "output": text}, {"call": name, "arguments": [...], "result": value} or "assert f(2) == 4"'
NO_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)
"""Errors that Python raises for a text that is no Python."""
_PLAIN_METHODS = {name for kind in (str, bytes, complex, float, int, list, tuple, dict, set) for name in dir(kind)}
_CONVERSIONS = {"bool", "int", "all", "any", "list", "tuple", "set"}
"""Functions that pass the truth of their argument on."""
_COMPARING = re.compile(
    r"equal|close|same|match|compare|assert|check|verify|expect|should|\Ato_?be|\A(?:eq|ne)\Z", re.IGNORECASE
)
"""Parts of the names of functions that compare an answer with a value."""
_MEASURING = re.compile(r"diff|dist|simil|err(?:or)?(?:_|\Z)|norm\Z|loss|levenshtein|hamming")
"""Parts of the names of functions that measure how far an answer is from a value."""
_CALLERS: dict[str, set[int | str]] = {
    "accumulate": {1},
    **{name: {0} for name in ("callable", "filter", "map", "partial", "reduce", "starmap")},
}
"""Functions that call an argument, with its position."""
_SIZES = {"abs", "any", "bool", "float", "int", "len", "max", "min", "round", "str", "sum"}
"""Functions that pass on how large their argument is."""
_LIBRARY_VALUES = {"approx", "array", "date", "datetime", "defaultdict", "deque", "timedelta"}
"""Names in small letters by which libraries construct values."""


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
    known, callers = _known_names(setup), _CALLERS | _calling(setup)
    cases = []
    for index, test in enumerate(tests):
        try:
            cases.append(_read_case(test, known, callers))
        except ValueError as error:
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
    return set(dir(builtins)).union(*map(_defined, ast.walk(ast.parse(setup))))


def _calling(setup: str) -> dict[str, set[int | str]]:
    """Return the parameters, by position and name, that each function of the setup calls."""
    found: dict[str, set[int | str]] = {}
    for function in (node for node in ast.walk(ast.parse(setup)) if isinstance(node, ast.FunctionDef)):
        called = {_root(node.func)[0] for node in ast.walk(function) if isinstance(node, ast.Call)}
        names = {node.id for node in called if isinstance(node, ast.Name)}
        for number, parameter in enumerate([*function.args.posonlyargs, *function.args.args]):
            if parameter.arg in names:
                found.setdefault(function.name, set()).update({number, parameter.arg})
    return found


def _bound(condition: ast.AST) -> set[str]:
    """Return the variables that a condition binds in comprehensions, lambdas and walrus operators."""
    arguments = {node.arg for node in ast.walk(condition) if isinstance(node, ast.arg)}
    return arguments.union(*map(_defined, ast.walk(condition)))


def _defined(node: ast.AST) -> set[str]:
    """Return the names that a node of a syntax tree binds."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    return {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else set()


def given_setup(setup: str, tests: Sequence[ValueCase | AssertCase]) -> str:
    """Return the setup without the definitions that conditions name and no question does.

    It also lacks the definitions that these need alone, and the statements that use or change what is left out.
    """
    statements = [part for statement in ast.parse(setup).body for part in _parts(statement)]
    imported = set(dir(builtins)).union(*map(_defined, filter(_is_import, statements)))
    used = [_names(statement) for statement in statements]
    changed = [_changed(statement) - imported for statement in statements]

    def reached(names: set[str], *, backwards: bool = True) -> set[int]:
        found: set[int] = set()
        while new := {number for number, own in enumerate(changed if backwards else used) if own & names} - found:
            found |= new
            names = names.union(*((used if backwards else changed)[number] for number in new))
        return found

    def named(expressions: Iterable[str]) -> set[str]:
        return set().union(*(_names(ast.parse(text)) for text in expressions))

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
            if all(isinstance(name, ast.Name) for name in names) and not _names(statement.value):
                pairs = zip(names, values, strict=True)
                return [ast.fix_missing_locations(ast.Assign(targets=[name], value=value, lineno=1)) for name, value in pairs]
    return [statement]


def _changed(statement: ast.stmt) -> set[str]:
    """Return the names that a statement may rebind, or whose objects it may change."""
    defined: set[str] = set().union(*map(_defined, ast.walk(statement)))
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets) if all(isinstance(target, (ast.Name, ast.Tuple, ast.List)) for target in targets):
            return defined
    return defined if _is_import(statement) else defined | _names(statement)


def _of_text(value: Any, opening: str) -> Any:
    """Parse JSON text, in which tables hold values of mixed forms; return any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith(opening):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value  # _read_case refuses it


def _read_case(test: Any, known: set[str], callers: Mapping[str, Container[int | str]]) -> StreamCase | ValueCase | AssertCase:
    test = _of_text(test, "{")
    if isinstance(test, str):
        return _read_assert(test, known, callers)
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


def _read_assert(text: str, known: set[str], callers: Mapping[str, Container[int | str]]) -> ValueCase | AssertCase:
    try:
        [statement] = ast.parse(text.strip()).body
    except NO_PYTHON as error:
        raise ValueError(f"found {text!r:.80}; expected one statement of Python, assert CONDITION ({error})") from error
    if not isinstance(statement, ast.Assert):
        raise ValueError(f"found {text!r:.80}; expected assert CONDITION")
    split = _Questions(known, _bound(statement.test))
    split.look_at_truth(statement.test)
    split.look_at_comparisons(statement.test)
    if function := split.handed_over(statement.test, callers):
        expected = f"calls of {function} in the condition itself: the sandbox returns plain data, and no function"
        raise ValueError(f"found {text!r:.80}, where the function {function} is an argument; expected {expected}")
    condition = split.visit(statement.test)
    if split.judges_itself:
        expected = (
            "a comparison with plain data, or a helper or class that the setup defines or imports: the program would be shown "
            "what is right, and would judge itself"
        )
        raise ValueError(f"found {text!r:.80}, where {split.judges_itself} is the program's; expected {expected}")
    if not split.questions or split.is_bound:
        raise ValueError(f"found {text!r:.80}; expected calls of the program's functions, outside comprehensions and lambdas")
    match condition:
        case ast.Compare(left=ast.Name(id="_0"), ops=[ast.Eq()], comparators=[right]) if len(split.questions) == 1:
            try:
                expected = ast.literal_eval(right)
                pack(expected)
                return ValueCase(question=split.questions[0], expected=expected, is_json=False)
            except (ValueError, TypeError):
                pass  # no literal: the judging sandbox evaluates the expression
    return AssertCase(questions=tuple(split.questions), condition=ast.unparse(condition), modules=tuple(sorted(split.modules)))


class _Questions(ast.NodeTransformer):
    """Replaces the parts of a condition that the program has to answer by `_0`, `_1`.

    These are the outermost calls of the program's names, and such names alone. The program does not see the rest of the
    condition with the expected values. Keys, and methods of plain data with arguments, are applied to the answer.
    """

    def __init__(self, known: set[str], bound: set[str]) -> None:
        self._known = known | bound
        self._bound = bound
        self.questions: list[str] = []
        self.is_bound = False
        """True where a question depends on a variable that the condition binds."""
        self.judges_itself = ""
        """A function of the program that would compare an answer with the expected value; empty where there is none."""
        self.modules: set[str] = set()

    def look_at_truth(self, node: ast.AST) -> None:
        """Set `judges_itself` where the truth of the condition is a call by which the program compares an answer."""
        parts: Iterable[ast.AST] = ()
        match node:
            case ast.Call(func=function) if self._is_programs(function):
                if self._compares(node):
                    self.judges_itself = ast.unparse(function)
            case ast.Call(func=ast.Name(id=name), args=arguments) if name in _CONVERSIONS:
                parts = arguments
            case ast.Compare(left=left, comparators=others) if any(map(_is_truth, [left, *others])):
                parts = [left, *others]
            case ast.BinOp(left=left, op=ast.BitAnd() | ast.BitOr() | ast.BitXor(), right=right):
                parts = [left, right]
            case ast.GeneratorExp(elt=element) | ast.ListComp(elt=element) | ast.SetComp(elt=element):
                parts = [element]
            case ast.BoolOp() | ast.UnaryOp() | ast.IfExp() | ast.NamedExpr() | ast.List() | ast.Tuple() | ast.Set():
                parts = ast.iter_child_nodes(node)
        for part in parts:
            self.look_at_truth(part)

    def look_at_comparisons(self, condition: ast.expr) -> None:
        """Set `judges_itself` where the program constructs the expected side of a comparison, or measures a difference."""
        for comparison in ast.walk(condition):
            if isinstance(comparison, ast.Compare):
                sides = [comparison.left, *comparison.comparators]
                is_equality = all(isinstance(one, (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)) for one in comparison.ops)
                finds_measures = not is_equality or any(map(_is_falsy, sides))
                for call in filter(self._is_programs, _leaves(*sides, through=_SIZES)):
                    if isinstance(call, ast.Call) and (
                        self._measures(call, finds_measures)
                        or self._constructs(call, [one for one in sides if one is not call])
                    ):
                        self.judges_itself = ast.unparse(call.func)

    def handed_over(self, condition: ast.expr, callers: Mapping[str, Container[int | str]]) -> str:
        """Return a function of the program that the condition hands to another function to call; empty without one."""
        for call in (node for node in ast.walk(condition) if isinstance(node, ast.Call) and not self._is_programs(node)):
            called = callers.get(ast.unparse(call.func).rpartition(".")[2], ())
            given = [*enumerate(call.args), *((keyword.arg, keyword.value) for keyword in call.keywords)]
            for place, argument in given:
                if self._is_function(argument) and (place == "key" or place in called):
                    return ast.unparse(argument)
        return ""

    def _measures(self, call: ast.Call, finds_measures: bool) -> bool:
        """Return whether a function compares or measures, by its name, and gets an answer and another value."""
        name = ast.unparse(call.func).rpartition(".")[2].lower()
        return bool(_COMPARING.search(name) or (finds_measures and _MEASURING.search(name))) and self._compares(call)

    def _constructs(self, call: ast.Call, others: Sequence[ast.expr]) -> bool:
        """Return whether a class or a library of the program constructs the value that an answer has to equal."""
        root, above = _root(call)
        name = root.id if isinstance(root, ast.Name) else ""
        is_class = _begins_with_capital(call.func) or name in _LIBRARY_VALUES
        is_dotted = isinstance(above, ast.Attribute) and name not in set().union(*map(_names, others))
        is_method = any(isinstance(link, ast.Call) for link in _chain(call.func))
        is_answer_there = any(map(self._asks, others))
        return (is_class or is_dotted) and not is_method and is_answer_there and not any(map(self._asks, _given(call)))

    def _compares(self, call: ast.Call) -> bool:
        """Return whether a call of the program gets an answer and another value, or is a method that compares an answer."""
        given = _given(call)
        match call.func:
            case ast.Attribute(value=receiver, attr=name) if given and _COMPARING.search(name) and self._asks(receiver):
                return True
        asked = [self._asks(one) or self._is_function(one) for one in given]
        others = [one for link in _chain(call.func) if isinstance(link, ast.Call) for one in _given(link)]
        return any(asked) and not all([*asked, *map(self._asks, others)])

    def visit(self, node: ast.AST) -> ast.AST:
        root, above = _root(node)
        if isinstance(root, ast.Name) and isinstance(above, ast.Attribute) and root.id in sys.stdlib_module_names - self._known:
            self.modules.add(root.id)
            self._known = self._known | {root.id}
        if isinstance(node, ast.expr) and self._is_programs(node):
            if not _asks_plain_data(node):
                return self._question(node)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                node.func.value = self.visit(node.func.value)
                node.args = [self.visit(one) for one in node.args]
                node.keywords = [self.visit(one) for one in node.keywords]
                return node
        return self.generic_visit(node)

    def _question(self, node: ast.expr) -> ast.Name:
        match node:
            case ast.Call(func=ast.Attribute(value=receiver) as function, args=arguments) if ast.unparse(receiver)[
                :1
            ].islower():
                is_module = all(isinstance(link, (ast.Attribute, ast.Name)) for link in _chain(receiver))
                if is_module and any(map(self._asks, arguments)):
                    self.judges_itself = ast.unparse(function)  # of a module that the setup does not import
        self.is_bound |= bool(_names(node) & (self._bound - _bound(node)))
        self.questions.append(ast.unparse(node))
        return ast.Name(id=f"_{len(self.questions) - 1}", ctx=ast.Load())

    def _is_programs(self, node: ast.AST) -> bool:
        """Return whether a chain begins with a name of the program, which may also be the name of a standard module."""
        root, above = _root(node)
        is_module = isinstance(root, ast.Name) and root.id in sys.stdlib_module_names and isinstance(above, ast.Attribute)
        return isinstance(root, ast.Name) and root.id not in self._known and not is_module

    def _is_function(self, node: ast.expr) -> bool:
        """Return whether an expression is the bare name of one of the program's functions."""
        return isinstance(node, ast.Name) and self._is_programs(node) and not _begins_with_capital(node)

    def _asks(self, node: ast.expr) -> bool:
        """Return whether an expression holds a call of the program that does not construct an object."""
        calls = [one for one in ast.walk(node) if isinstance(one, ast.Call) and self._is_programs(one)]
        return not all(_begins_with_capital(call.func) for call in calls)


def _chain(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the links of a chain of calls, attributes and subscripts from the last one to the root."""
    yield node
    while isinstance(node, (ast.Call, ast.Attribute, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
        yield node


def _root(node: ast.AST) -> tuple[ast.AST, ast.AST | None]:
    """Return the root of a chain, and the link after it."""
    *links, root = _chain(node)
    return root, links[-1] if links else None


def _given(call: ast.Call) -> list[ast.expr]:
    """Return the arguments of a call, with lists, operations and comparisons taken apart."""
    return list(_leaves(*call.args, *(keyword.value for keyword in call.keywords)))


def _leaves(*nodes: ast.expr, through: Container[str] = ()) -> Iterator[ast.expr]:
    """Yield the parts of literals, operations, comparisons, and calls of the functions `through`."""
    for node in nodes:
        parts = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in through:
                yield from _leaves(*node.args, through=through)
            case _ if parts and isinstance(node, _COMPOUND):
                yield from _leaves(*parts, through=through)
            case _:
                yield node


_COMPOUND = (ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Starred, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp)


def _begins_with_capital(node: ast.expr) -> bool:
    """Return whether the last name of a chain begins with a capital, as a class's does."""
    last = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return last[:1].isupper()


def _is_truth(node: ast.expr) -> bool:
    """Return whether a literal is True or False, or a sequence of these."""
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return bool(node.elts) and all(map(_is_truth, node.elts))
    return isinstance(node, ast.Constant) and isinstance(node.value, bool)


def _is_falsy(node: ast.expr) -> bool:
    """Return whether a literal is None, False, zero or empty."""
    try:
        return not ast.literal_eval(node)
    except ValueError:
        return False


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _asks_plain_data(node: ast.expr) -> bool:
    """Return whether the last link is a key, or a method of plain data with arguments, of a function's result."""
    match node:
        case ast.Subscript(slice=key):
            return not _is_position(key)
        case ast.Call(func=ast.Attribute(value=receiver, attr=name)):
            while isinstance(receiver, ast.Subscript):
                receiver = receiver.value
            called = receiver.func if isinstance(receiver, ast.Call) else None
            last = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            return bool(node.args or node.keywords) and name in _PLAIN_METHODS and last[:1].islower()
    return False


def _is_position(key: ast.expr) -> bool:
    """Return whether a subscript is an integer or a slice of integers."""
    parts = [key.lower, key.upper, key.step] if isinstance(key, ast.Slice) else [key]
    try:
        return all(part is None or isinstance(ast.literal_eval(part), int) for part in parts)
    except ValueError:
        return False
