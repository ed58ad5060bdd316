"""Tests of the core reach into nothing private: what they say has to stay true when a module is written otherwise."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ELSEWHERE = {"self", "cls", "os", "sys"}
"""A test class's own attributes, and the interpreter's."""


def private_names(path: Path) -> Iterator[str]:
    """What a file imports, reads and patches."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ImportFrom(module=str(module)) if module.startswith("rlcore"):
                yield from (alias.name for alias in node.names)
            case ast.Attribute(value=ast.Name(id=owner)) if owner in ELSEWHERE:
                pass
            case ast.Attribute(attr=name):
                yield name
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[*arguments]):
                texts = (argument.value for argument in arguments[:2] if isinstance(argument, ast.Constant))
                yield from (str(text).rpartition(".")[2] for text in texts)


@pytest.mark.parametrize("folder", ["cli", "config", "registry", "run", "schema", "serve", "spi", "testing"])
def test_no_private_name_is_used(root: Path, folder: str) -> None:
    files = [path for path in (root / "tests" / "core" / folder).rglob("*.py") if path.parent.name != "ray"]
    assert files
    found = [
        f"{path}: {name}"
        for path in files
        for name in private_names(path)
        if name.startswith("_") and not name.startswith("__")
    ]
    assert not found, "\n".join(found)
