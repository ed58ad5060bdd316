"""docs/spi.md, generated from the sources of rlcore.spi: every public name with its docstring. As a script, prints it."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import rlcore.schema.problem
import rlcore.spi
from rlcore.spi import SPI_VERSION

INTERFACE = Path(rlcore.spi.__file__).parent
PROBLEM = Path(rlcore.schema.problem.__file__)
VERSION = ".".join(map(str, SPI_VERSION))
INTRODUCTION = f"""\
# The interface

All that a plugin imports from `rlcore.spi`, version {VERSION}. This page is generated from the docstrings by `make docs`, so it
is complete. [plugins.md](plugins.md) shows how the parts are used, [versions.md](versions.md) says what may change and what has
changed.

`[T]` is the number of tokens, `[N]` that of sequences, `[V]` the size of the vocabulary. Records are frozen, and take keywords
alone.
"""


def document() -> str:
    """The whole page."""
    lines = [INTRODUCTION]
    for module, names in exported().items():
        tree = ast.parse((INTERFACE / f"{module}.py").read_text(encoding="utf-8"))
        lines += [f"## `rlcore.spi.{module}`\n", f"{ast.get_docstring(tree)}\n"]
        body = [*tree.body, *ast.parse(PROBLEM.read_text(encoding="utf-8")).body]
        for node, following in zip(body, [*body[1:], None], strict=True):
            if name_of(node) in names:
                lines += described(node, docstring_of(following))
    return "\n".join(lines).rstrip() + "\n"


def exported() -> dict[str, set[str]]:
    """Public names by the module that they are imported from; all of `capabilities`, which is public itself."""
    tree = ast.parse((INTERFACE / "capabilities.py").read_text(encoding="utf-8"))
    known = {name for each in tree.body if (name := name_of(each)) and not name.startswith("_")}
    modules = {module: set(names.split()) for module, names in rlcore.spi.NAMES.items()}
    return dict(sorted({**modules, "capabilities": known}.items()))


def name_of(node: ast.AST) -> str | None:
    """The name that a statement defines."""
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
            return name
    return None


def docstring_of(node: ast.AST | None) -> str:
    """The text of a statement that is a string, such as stands beneath a field."""
    match node:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return " ".join(text.split())
    return ""


def described(node: ast.AST, beneath: str) -> Iterator[str]:
    """A definition: a class with fields and methods, a function with its signature, a constant with its value."""
    match node:
        case ast.ClassDef():
            yield from described_class(node)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield f"### `{node.name}`\n"
            yield f"```text\n{signature(node)}\n```\n"
            yield f"{ast.get_docstring(node) or ''}\n"
        case ast.AnnAssign(value=value) | ast.Assign(value=value):
            yield f"### `{name_of(node)}`\n"
            if value is not None:
                yield f"```text\n{name_of(node)} = {ast.unparse(value)}\n```\n"
            if beneath:
                yield f"{beneath}\n"


def described_class(node: ast.ClassDef) -> Iterator[str]:
    """Its docstring, a table of its fields, and its methods."""
    yield f"### `{node.name}`\n"
    if bases := ", ".join(f"`{ast.unparse(base)}`" for base in node.bases if ast.unparse(base) != "Protocol"):
        yield f"Based on {bases}.\n"
    if text := ast.get_docstring(node):
        yield f"{text}\n"
    rows = [
        field_row(field, docstring_of(following))
        for field, following in zip(node.body, [*node.body[1:], None], strict=True)
        if isinstance(field, ast.AnnAssign | ast.Assign) and not (name_of(field) or "_").startswith("_")
    ]
    if rows:
        yield "| Field | Type | Default | Meaning |\n|---|---|---|---|"
        yield "\n".join(rows) + "\n"
    for method in node.body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and not method.name.startswith("_"):
            yield f"```text\n{signature(method)}\n```\n"
            yield f"{ast.get_docstring(method) or ''}\n"


def field_row(node: ast.AnnAssign | ast.Assign, text: str) -> str:
    """One line of a table."""
    kind = f"`{ast.unparse(node.annotation)}`" if isinstance(node, ast.AnnAssign) else ""
    default = f"`{ast.unparse(node.value)}`" if node.value is not None else ""
    cells = (f"`{name_of(node)}`", kind, default, text)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The head of a function, with what decorates it."""
    decorators = "".join(f"@{ast.unparse(decorator)}\n" for decorator in node.decorator_list)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{decorators}{keyword} {node.name}({ast.unparse(node.args)}){returns}: ..."


if __name__ == "__main__":
    sys.stdout.write(document())
