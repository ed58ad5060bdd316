"""Check a loss by its source code, without importing it: the import of a loss imports torch."""

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache

from attrs import frozen

from rlcore import spi
from rlcore.installed import is_installed
from rlcore.schema.suggestions import did_you_mean

_MAYBE = (ast.If, ast.IfExp, ast.BoolOp, ast.Try, ast.Match, ast.For, ast.While, ast.Lambda, ast.FunctionDef, ast.comprehension)
"""Statements and expressions whose parts may never run."""


@frozen(kw_only=True)
class ColumnsRead:
    """The names of the columns that a loss reads in every call."""

    token: frozenset[str] = frozenset()
    sequence: frozenset[str] = frozenset()


def loss_problem(path: object) -> str | None:
    """Return the fault of a loss's path, in its form, its module or its function; None without one."""
    if not isinstance(path, str) or not all(path.partition(":")):
        return f"{path!r}"
    module, _, name = path.partition(":")
    if not is_installed(module):
        return f"{path!r}, but there is no module {module!r}"
    if module in sys.modules:
        return None if hasattr(sys.modules[module], name.partition(".")[0]) else _absent(path, dir(sys.modules[module]))
    tree = _tree(module)
    names = None if tree is None else _names(tree)
    return None if names is None or name.partition(".")[0] in names else _absent(path, names)


def columns_read(path: str) -> ColumnsRead:
    """Return the columns that a loss reads by a constant name, in lines that run in every call."""
    module, _, name = path.partition(":")
    tree = _tree(module)
    if tree is None:
        return ColumnsRead()
    constants = {name: value for name, value in vars(spi).items() if isinstance(value, str)} | _constants(tree)
    found: dict[str, set[str]] = {"token_columns": set(), "sequence_columns": set()}
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name):
        for node in _always_run(function.body):
            match node:
                case ast.Subscript(value=ast.Attribute(value=ast.Name(), attr=kind), slice=ast.Constant(value=str(column))):
                    found.get(kind, set()).add(column)
                case ast.Subscript(
                    value=ast.Attribute(value=ast.Name(), attr=kind), slice=ast.Name(id=key) | ast.Attribute(attr=key)
                ) if key in constants:
                    found.get(kind, set()).add(constants[key])
    return ColumnsRead(token=frozenset(found["token_columns"]), sequence=frozenset(found["sequence_columns"]))


def _absent(path: str, names: Iterable[str]) -> str:
    module, _, name = path.partition(":")
    return f"{path!r}, but {module} has no {name!r}{did_you_mean(name, names)}"


@lru_cache
def _tree(module: str) -> ast.Module | None:
    """Return the syntax tree of a module's source; None where the source cannot be read."""
    try:
        spec = importlib.util.find_spec(module)
        source = None if spec is None or spec.loader is None else getattr(spec.loader, "get_source", lambda _: None)(module)
        return None if source is None else ast.parse(source)
    except (ImportError, ValueError, SyntaxError):  # the import of the loss reports the fault
        return None


def _names(tree: ast.Module) -> set[str] | None:
    """Return the names that a module binds; None where it may bind others at run time, such as by `setattr`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name="__getattr__") | ast.ImportFrom(names=[ast.alias(name="*")]):
                return None
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.alias(name=name, asname=alias):
                names.add(alias or name.partition(".")[0])
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Call(func=ast.Name(id="globals" | "setattr" | "exec")):
                return None
    return names


def _constants(tree: ast.Module) -> dict[str, str]:
    """Return the string constants that a module assigns, by name."""
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _always_run(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the nodes of a function that run in every call, up to the first branch that may return or raise."""
    for statement in body:
        if isinstance(statement, _MAYBE):
            if any(isinstance(node, ast.Return | ast.Raise) for node in ast.walk(statement)):
                return
            continue
        waiting: list[ast.AST] = [statement]
        while waiting:
            node = waiting.pop()
            if isinstance(node, (*_MAYBE, ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)):
                continue
            yield node
            waiting += ast.iter_child_nodes(node)
