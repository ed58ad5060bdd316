"""Check what a path of `package.module:name` names by the source code of its module. Nothing is imported, such as torch."""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache

from attrs import frozen

from rlcore import spi
from rlcore.installed import missing_module, module_spec
from rlcore.schema.suggestions import did_you_mean

_MAYBE = (ast.If, ast.IfExp, ast.BoolOp, ast.Try, ast.Match, ast.For, ast.While, ast.Lambda, ast.FunctionDef, ast.comprehension)
"""Statements and expressions whose parts may never run."""


@frozen(kw_only=True)
class ColumnsRead:
    """The names of the columns that a loss reads in every call."""

    token: frozenset[str] = frozenset()
    sequence: frozenset[str] = frozenset()


def path_problem(path: object, *, quick: bool = False) -> str | None:
    """Return the fault of a path, in its form, its module or its name; None without one.

    A `quick` look parses no module that has a line which begins a class or function of the name.
    """
    if not isinstance(path, str) or not all(path.partition(":")):
        return f"{path!r}"
    module, _, name = path.partition(":")
    if (missing := missing_module(module)) is not None:
        return f"{path!r}, but there is no module {missing!r}"
    name = name.partition(".")[0]
    if module in sys.modules:
        found = vars(sys.modules[module])
        return None if name in found or "__getattr__" in found else _absent(path, found)
    try:
        if quick and re.search(rf"^(class|def) {name}\b", _source(module) or "", re.MULTILINE):
            return None
        tree = _tree(module)
    except (SyntaxError, ValueError) as error:
        return f"{path!r}, but {module} is no Python: {error}"
    names = None if tree is None else _names(tree)
    return None if names is None or name in names else _absent(path, names)


def columns_read(path: str) -> ColumnsRead:
    """Return the columns that a loss reads by a constant name, in lines that run in every call."""
    module, _, name = path.partition(":")
    tree = _tree(module)
    if tree is None:
        return ColumnsRead()
    constants = _constants(tree)
    found: dict[str, set[str]] = {"token_columns": set(), "sequence_columns": set()}
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name):
        for node in _always_run(function.body):
            match node:
                case ast.Subscript(value=ast.Attribute(value=ast.Name(), attr=kind), slice=key, ctx=ast.Load()):
                    match key:
                        case ast.Constant(value=str(column)):
                            found.get(kind, set()).add(column)
                        case ast.Name(id=constant) | ast.Attribute(attr=constant):
                            value = constants.get(constant, getattr(spi, constant, None))
                            found.get(kind, set()).update([value] if isinstance(value, str) else [])
    return ColumnsRead(token=frozenset(found["token_columns"]), sequence=frozenset(found["sequence_columns"]))


def _absent(path: str, names: Iterable[str]) -> str:
    module, _, name = path.partition(":")
    return f"{path!r}, but {module} has no {name!r}{did_you_mean(name, names)}"


def _tree(module: str) -> ast.Module | None:
    """Return the syntax tree of a module's source; None where the source cannot be read."""
    source = _source(module)
    return None if source is None else _parsed(source)


@lru_cache
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def _source(module: str) -> str | None:
    spec = module_spec(module)
    return None if spec is None else _read_source(spec.loader, module)


@lru_cache
def _read_source(loader: object, module: str) -> str | None:
    try:
        source: str | None = getattr(loader, "get_source", lambda _: None)(module)
    except ImportError:  # the import reports the fault
        return None
    return source


def _names(tree: ast.Module) -> set[str] | None:
    """Return the names that a module binds; None where it may bind others at run time, such as by `setattr`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(names=[ast.alias(name="*")]) | ast.Attribute(value=ast.Name(id="sys"), attr="modules"):
                return None
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.alias(name=name, asname=alias):
                names.add(alias or name.partition(".")[0])
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Global(names=more):
                names.update(more)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                names.add(name)
            case ast.Call(func=ast.Name(id="globals" | "locals" | "vars" | "setattr" | "exec")):
                return None
    return None if "__getattr__" in names else names


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
        if isinstance(statement, _MAYBE) or (
            isinstance(statement, ast.With) and any("suppress" in ast.unparse(item) for item in statement.items)
        ):
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
        if isinstance(statement, ast.Return | ast.Raise):
            return
