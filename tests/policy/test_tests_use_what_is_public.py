"""Tests reach into nothing private: what they say has to stay true when a module is written otherwise."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ELSEWHERE = {"self", "cls", "os", "sys"}
"""A test class's own attributes, and the interpreter's."""

REACHES = {
    "ray_execution/test_worker.py": {"_plugins"},
    "transformers_generation/test_engine_streams.py": {"_cache", "_generation", "_kinds"},
    "vllm_generation/test_backend.py": {"_changed", "_core", "_hand_out", "_num_starts", "_replicas", "_waiting"},
    "vllm_generation/test_backend_start_order.py": {"_start"},
    "vllm_generation/test_process.py": {"_child", "_receiver", "_config", "_end", "_replicas"},
    "vllm_generation/test_transfer_gpu.py": {"_child"},
    "vllm_generation/test_transfer_processes.py": {"_child"},
}
"""What is still reached into. On Ray, the plugins of a worker before its first call. In the embedded generator, the cache that
it keeps from one generation to the next. In vLLM, the process behind a replica, which tests kill, stop and make slow, the
engine in it, which they make fail, and what waits between its threads. No caller has a use for any of these."""


PRIVATE_USE = re.compile(r"""[.'" ]_[a-zA-Z]""")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def used_names(path: Path) -> Iterator[str]:
    """Return the names of the packages that a file imports, reads and patches; none where no private name follows."""
    text = path.read_text()
    if not PRIVATE_USE.search(text):  # parsing all files takes seconds
        return
    for node in ast.walk(ast.parse(text)):
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


def own_names(paths: Iterable[Path]) -> Iterator[str]:
    """Functions, classes and attributes that the packages define: what is private to another library is its own affair."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    yield name
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                    yield name


def test_no_private_name_is_used(
    root: Path, core_files: list[Path], torchkit_files: list[Path], plugin_files: list[Path]
) -> None:
    private = set(filter(is_private, own_names((*core_files, *torchkit_files, *plugin_files))))
    assert "_collected" in private
    found = {
        path.relative_to(root / "tests").as_posix(): names
        for path in sorted((root / "tests").rglob("*.py"))
        if (names := private & set(used_names(path)))
    }
    assert found == REACHES, "use what is public, or make it so; take out of REACHES what is no longer reached into"
