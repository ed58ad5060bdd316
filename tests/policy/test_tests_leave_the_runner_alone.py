"""Tests do nothing that stops pytest-xdist. They patch no function by which its own thread reads what it is sent while a test
runs: a message that comes then is lost, and all processes wait for each other in the end. They trace none of its processes."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

USED_BY_THE_RUNNER = {"io", "marshal", "queue", "struct", "threading"}
"""Modules that execnet, which pytest-xdist speaks through, uses in that thread. In the module under test another can take the
place of each."""


def patched_modules(path: Path) -> Iterator[str]:
    """The modules whose attributes a file patches, as monkeypatch and mock take them."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if "setattr" in text or "patch" in text else ():  # parsing all files takes seconds
        match node:
            case ast.Call(func=ast.Attribute(attr="setattr" | "object"), args=[ast.Name(id=name), _, *_]):
                yield name
            case ast.Call(func=ast.Attribute(attr="setattr" | "patch"), args=[ast.Constant(value=str(text)), *_]):
                yield text.partition(".")[0]


def test_what_reads_the_runners_messages_is_patched_nowhere(root: Path, tmp_path: Path) -> None:
    example = tmp_path / "example.py"
    example.write_text('monkeypatch.setattr(struct, "unpack", f)\nmock.patch("io.open")\nmock.patch.object(os, "kill")\n')
    assert list(patched_modules(example)) == ["struct", "io", "os"]
    files = sorted((root / "tests").rglob("*.py"))
    found = [str(path.relative_to(root)) for path in files if USED_BY_THE_RUNNER & set(patched_modules(path))]
    assert found == []


def test_no_process_of_the_runner_is_traced(root: Path) -> None:
    """Python 3.11 turns for ever in some processes that are or were traced or profiled: such tests are marked `own_process`."""
    watching = re.compile(r"sys\.set(trace|profile)\(|\bcount_calls\b.*:$", re.MULTILINE)
    unmarked = []
    for path in sorted((root / "tests").rglob("test_*.py")):
        text = path.read_text()
        if watching.search(text) and "@pytest.mark.own_process\n" not in text:
            unmarked.append(str(path.relative_to(root)))
    assert unmarked == []
