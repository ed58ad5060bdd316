"""Splits the condition of an assert into questions for the program and an expression of the answers."""

import ast
import re
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias

_PLAIN_METHODS = {name for kind in (str, bytes, complex, float, int, list, tuple, dict, set) for name in dir(kind)}
_CONVERSIONS = {"bool", "int", "all", "any", "list", "tuple", "set"}
"""Functions that pass the truth of their argument on."""
_COMPARING = re.compile(
    r"equal|close|same|match|compare|assert|check|verify|expect|should|\Ato_?be|\A(?:eq|ne)\Z", re.IGNORECASE
)
"""Parts of the names of functions that compare an answer with a value."""
_MEASURING = re.compile(r"diff|dist|simil|err(?:or)?(?:_|\Z)|norm\Z|loss|levenshtein|hamming")
"""Parts of the names of functions that measure how far an answer is from a value."""
Callers: TypeAlias = Mapping[str, Container[int | str]]
"""Functions that call an argument, each with the positions and names of such arguments."""
_FIRST = (
    *(
        "apply",
        "callable",
        "cmp_to_key",
        "defaultdict",
        "dropwhile",
        "filter",
        "filterfalse",
        "fromiter",
        "getsource",
        "hasattr",
        "iter",
    ),
    *("map", "partial", "reduce", "repeat", "signature", "starmap", "takewhile", "timeit", "vectorize", "wraps"),
)
_SECOND = ("accumulate", "apply_along_axis", "groupby", "sub", "subn")
CALLERS: Callers = {**{name: {0} for name in _FIRST}, **{name: {1} for name in _SECOND}}
_KEYS = {"key", "default_factory", "func", "function"}
"""Names of parameters that are functions."""
_MOST_ARGUMENTS = 256
_ON_DATA = {
    *("abs", "all", "any", "bool", "dict", "enumerate", "float", "frozenset", "int", "isinstance", "isclose", "len", "list"),
    *("max", "min", "print", "range", "repr", "reversed", "round", "set", "sorted", "str", "sum", "tuple", "type", "zip"),
}
"""Functions whose arguments without a name are data."""
_SIZES = {"abs", "any", "bool", "float", "int", "len", "max", "min", "round", "str", "sum"}
"""Functions that pass on how large their argument is."""
_LIBRARY_VALUES = {"approx", "array", "date", "datetime", "defaultdict", "deque", "timedelta"}
"""Names in small letters by which libraries construct values."""
_SHOWING = {
    *("abs", "bool", "callable", "dict", "dir", "float", "frozenset", "getattr", "hasattr", "hash", "int", "isinstance", "len"),
    *("list", "next", "repr", "round", "set", "sorted", "str", "sum", "tuple", "type", "vars"),
}
"""Builtin functions that make data of an object. The program applies them to objects that it constructs."""
_OF_CODE = {"ast", "asyncio", "dataclasses", "dis", "gc", "inspect", "traceback", "types", "weakref"}
"""Modules whose functions take functions, classes, coroutines or objects."""
_OF_OBJECTS = {"id", "issubclass"}
"""Builtin functions of the same kind."""


class Questions(ast.NodeTransformer):
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
                self._look_at_objects(comparison, sides)
                is_equality = all(isinstance(one, (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)) for one in comparison.ops)
                finds_measures = not is_equality or any(map(_is_falsy, sides))
                for call in filter(self._is_programs, _leaves(*sides, through=_SIZES)):
                    if isinstance(call, ast.Call) and (
                        self._measures(call, finds_measures)
                        or self._constructs(call, [one for one in sides if one is not call])
                    ):
                        self.judges_itself = ast.unparse(call.func)

    def _look_at_objects(self, comparison: ast.Compare, sides: Sequence[ast.expr]) -> None:
        """Set `judges_itself` where the program's objects or constants are compared with each other, or answers by identity."""
        leaves = list(_leaves(*sides))
        given = [one for one in leaves if isinstance(one, ast.Attribute) and self._is_constant_of_class(one)]
        is_identity = any(isinstance(one, (ast.Is, ast.IsNot)) for one in comparison.ops)
        if all(map(self._is_object, leaves)) or (given and any(map(self._asks, sides))):
            self.judges_itself = ast.unparse((given or leaves)[0])
        elif is_identity and all(map(self._is_programs, sides)):
            self.judges_itself = ast.unparse(comparison)

    def _is_object(self, node: ast.AST) -> bool:
        """Return whether an expression constructs an object of the program, by the name's capital, or combines such objects."""
        match node:
            case ast.BinOp(left=left, right=right):
                return self._is_object(left) and self._is_object(right)
            case ast.UnaryOp(operand=operand):
                return self._is_object(operand)
        return isinstance(node, ast.Call) and self._is_programs(node) and _begins_with_capital(node.func)

    def _is_constant_of_class(self, node: ast.AST) -> bool:
        links = list(_chain(node))
        return self._is_programs(node) and links[-1].id[:1].isupper() and not any(isinstance(one, ast.Call) for one in links)

    def _shows_object(self, node: ast.AST) -> bool:
        """Return whether a chain reads data of the program's objects: an operation on them, or a builtin function of one."""
        root, _ = _root(node)
        if isinstance(root, (ast.BinOp, ast.UnaryOp)):
            return self._is_object(root)
        calls = [one for one in _chain(node) if isinstance(one, ast.Call)]
        match calls:
            case [*_, ast.Call(func=ast.Name(id=name), args=[one, *others], keywords=[])] if name in _SHOWING - self._bound:
                return self._is_object(one) and not any(map(self._asks, others))
        return False

    def handed_over(self, condition: ast.expr, callers: Callers, functions: Container[str]) -> str:
        """Return a function or class of the program that the condition names without a call; empty without one.

        `functions` are names that the tests call: each of these is a function wherever it stands.
        """
        nodes = list(self._outside_questions(condition))
        bare = [node for node in nodes if isinstance(node, ast.Name) and self._is_programs(node)]
        calls_values = any(isinstance(node, ast.Call) and self._calls_a_value(node) for node in nodes)
        for name in bare:
            is_class = _begins_with_capital(name) and not name.id.isupper()
            if calls_values or is_class or name.id in functions or name is condition or id(name) in _compared_with_none(nodes):
                return name.id
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            places = callers.get(ast.unparse(call.func).rpartition(".")[2], ())
            given = [*enumerate(call.args), *((keyword.arg, keyword.value) for keyword in call.keywords)]
            for place, argument in given:
                if self._is_function(argument) and (
                    place in _KEYS or place in places or (isinstance(place, str) and "**" in places)
                ):
                    return ast.unparse(argument)
        return ""

    def _calls_a_value(self, call: ast.Call) -> bool:
        """Return whether a call's function is a variable of the condition, an item of a container, or another expression."""
        if isinstance(call.func, ast.Name):
            return call.func.id in self._bound
        return not isinstance(call.func, ast.Attribute)

    def _outside_questions(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes that are no part of a call or attribute of the program."""
        if not (self._is_programs(node) and isinstance(node, (ast.Call, ast.Attribute, ast.Subscript))):
            yield node
            for part in ast.iter_child_nodes(node):
                yield from self._outside_questions(part)

    def _measures(self, call: ast.Call, finds_measures: bool) -> bool:
        """Return whether a function compares or measures, by its name, and gets an answer and another value."""
        name = ast.unparse(call.func).rpartition(".")[2].lower()
        return bool(_COMPARING.search(name) or (finds_measures and _MEASURING.search(name))) and self._compares(call)

    def _constructs(self, call: ast.Call, others: Sequence[ast.expr]) -> bool:
        """Return whether a class or a library of the program constructs the value that an answer has to equal."""
        root, above = _root(call)
        name = root.id if isinstance(root, ast.Name) else ""
        is_class = _begins_with_capital(call.func) or name in _LIBRARY_VALUES
        is_dotted = isinstance(above, ast.Attribute) and name not in set().union(*map(names_of, others))
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
        is_of_code = isinstance(root, ast.Name) and root.id in _OF_OBJECTS | (_OF_CODE & self.modules)
        if is_of_code and isinstance(node, ast.Call) and any(map(self._is_programs, _given(node))):
            self.judges_itself = ast.unparse(node)  # answers are plain data
        if isinstance(node, ast.expr) and self._shows_object(node):
            return self._question(node)
        if isinstance(node, ast.expr) and self._is_programs(node):
            if not _asks_plain_data(node):
                return self._question(node)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                node.func.value = self.visit(node.func.value)
                node.args = [self.visit(one) for one in node.args]
                node.keywords = [self.visit(one) for one in node.keywords]
                return node
        return super().visit(node)

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        """Refuse calls of the program in a function, which may never be called, or be called for its error."""
        num_questions = len(self.questions)
        visited = self.generic_visit(node)
        self.is_bound |= len(self.questions) > num_questions
        return visited

    def _question(self, node: ast.expr) -> ast.Name:
        match node:
            case ast.Call(func=ast.Attribute(value=receiver) as function, args=arguments) if ast.unparse(receiver)[
                :1
            ].islower():
                is_module = all(isinstance(link, (ast.Attribute, ast.Name)) for link in _chain(receiver))
                if is_module and any(map(self._asks, arguments)):
                    self.judges_itself = ast.unparse(function)  # of a module that the setup does not import
        self.is_bound |= bool(names_of(node) & (self._bound - bound_by(node)))
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


def called_by(texts: Iterable[str]) -> set[str]:
    """Return the names that Python code calls; texts that are none are left out."""
    found = set[str]()
    for text in texts:
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            nodes = [node.func for node in ast.walk(ast.parse(text.strip())) if isinstance(node, ast.Call)]
            found |= {node.id for node in nodes if isinstance(node, ast.Name)}
    return found


def calling(setup: str) -> Callers:
    """Return the parameters, by position and name, that each function of the setup calls, or may hand on to be called."""
    found: dict[str, set[int | str]] = {}
    for function in (node for node in ast.walk(ast.parse(setup)) if isinstance(node, ast.FunctionDef)):
        names = set(_may_be_called(function))
        for number, parameter in enumerate([*function.args.posonlyargs, *function.args.args]):
            if parameter.arg in names:
                found.setdefault(function.name, set()).update({number, parameter.arg})
        found.setdefault(function.name, set()).update(one.arg for one in function.args.kwonlyargs if one.arg in names)
        if function.args.vararg is not None and names_of(function) & {function.args.vararg.arg}:
            found[function.name].update(range(len(function.args.args), _MOST_ARGUMENTS))
        if function.args.kwarg is not None and names_of(function) & {function.args.kwarg.arg}:
            found[function.name].add("**")
    return found


def _may_be_called(function: ast.FunctionDef) -> Iterator[str]:
    """Yield the names that a function calls, hands to other functions, keeps under another name, or returns."""
    for node in ast.walk(function):
        parts: list[ast.expr | None] = []
        match node:
            case ast.Call(func=called, args=arguments, keywords=keywords):
                root = _root(called)[0]
                parts = [root] if isinstance(root, ast.Name) else []
                if not (isinstance(called, ast.Name) and called.id in _ON_DATA):
                    parts += arguments
                parts += [keyword.value for keyword in keywords]
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts) | ast.Dict(values=parts):
                pass
            case ast.Assign(value=value) | ast.Return(value=value) | ast.NamedExpr(value=value) | ast.Starred(value=value):
                parts = [value]
            case ast.FunctionDef(args=ast.arguments(defaults=defaults)) if node is not function:
                parts = [*defaults]
        yield from (part.id for part in parts if isinstance(part, ast.Name))


def bound_by(condition: ast.AST) -> set[str]:
    """Return the variables that a condition binds in comprehensions, lambdas and walrus operators."""
    arguments = {node.arg for node in ast.walk(condition) if isinstance(node, ast.arg)}
    return arguments.union(*map(defined_by, ast.walk(condition)))


def defined_by(node: ast.AST) -> set[str]:
    """Return the names that a node of a syntax tree binds."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    return {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else set()


def _compared_with_none(nodes: Iterable[ast.AST]) -> set[int]:
    """Return the identities of the left sides of comparisons with None, which tell whether a function is there."""
    return {
        id(node.left)
        for node in nodes
        if isinstance(node, ast.Compare)
        and any(isinstance(one, ast.Constant) and one.value is None for one in node.comparators)
    }


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


def names_of(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
