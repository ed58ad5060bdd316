"""The core needs no torch: no module of it imports torch, and what tests it without torch can be collected."""

import ast
import os
import subprocess
import sys

BLOCKED = """
import sys
import pytest

for name in ("torch", "transformers", "ray"):
    sys.modules[name] = None  # the import system's own way to say that there is none
sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def is_type_checking(node):
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def torch_imports(node):
    """Lines that import torch, in functions too and by import_module, but for types alone."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            continue
        names = []
        if isinstance(child, ast.Import):
            names = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            names = [child.module or ""]
        elif isinstance(child, ast.Call) and getattr(child.func, "id", getattr(child.func, "attr", "")) in IMPORTERS:
            names = [argument.value for argument in child.args if isinstance(argument, ast.Constant)]
        if any(str(name).partition(".")[0] == "torch" for name in names):
            yield child.lineno
        yield from torch_imports(child)


IMPORTERS = ("import_module", "__import__")


def test_the_search_finds_every_kind_of_import():
    source = """
if TYPE_CHECKING:
    import torch
import torch.distributed
def lazily():
    from torch.distributed import TCPStore
    return importlib.import_module("torch"), import_module("torch.cuda"), import_module("torchao")
"""
    assert list(torch_imports(ast.parse(source))) == [4, 6, 7, 7]


def test_no_module_of_the_core_but_testing_imports_torch(core_files):
    own = [path for path in core_files if "testing" not in path.parts]
    assert len(own) > 100
    texts = {path: text for path in own if "torch" in (text := path.read_text())}
    found = [f"{path}:{line}" for path, text in texts.items() for line in torch_imports(ast.parse(text))]
    assert not found, f"what needs torch belongs into a plugin: {', '.join(found)}"


def test_the_tests_of_the_core_are_collected_without_torch(root):
    """Those of `make test-core` among them."""
    result = subprocess.run(
        [sys.executable, "-c", BLOCKED, "tests/core", "--ignore=tests/core/testing"],
        cwd=root,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
