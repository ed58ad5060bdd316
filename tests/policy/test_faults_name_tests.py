"""The tests that the table of planted faults names are there: one that is moved is named where it went."""

import ast
from pathlib import Path

import pytest

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
