"""The tests and lines that the table of planted faults names are there: one that is moved or rewritten is told."""

import ast
from pathlib import Path

import pytest

from ..mutants.faults import FAULTS as PLANTED  # type: ignore[import-not-found]

FAULTS = "tests/mutants/faults.py"


@pytest.fixture(scope="module")
def named(root: Path) -> set[str]:
    """Every test that the table names, `file::function`."""
    strings = [node.value for node in ast.walk(ast.parse((root / FAULTS).read_text())) if isinstance(node, ast.Constant)]
    tests = {value.partition("[")[0] for value in strings if isinstance(value, str) and value.startswith("tests/")}
    assert len(tests) > 5
    return tests


def test_each_test_that_finds_a_fault_is_there(root: Path, named: set[str]) -> None:
    missing = []
    for test in sorted(named):
        file, _, function = test.partition("::")
        path = root / file
        if not path.is_file() or (function and f"def {function.rpartition('::')[2]}(" not in path.read_text()):
            missing.append(test)
    assert not missing, f"{FAULTS} names tests that are not there: {', '.join(missing)}"


def test_each_line_that_a_fault_replaces_occurs_once(
    core_files: list[Path], torchkit_files: list[Path], plugin_files: list[Path]
) -> None:
    modules = {path.as_posix().partition("/src/")[2]: path for path in (*core_files, *torchkit_files, *plugin_files)}
    wrong = [
        fault.name for fault in PLANTED if modules[f"{fault.module.replace('.', '/')}.py"].read_text().count(fault.line) != 1
    ]
    assert not wrong, f"{FAULTS} replaces lines that are not there once: {', '.join(wrong)}"
