"""The whole interface against a snapshot, so that no change to it is silent.

A change that is meant: raise `SPI_VERSION` (the minor for an addition behind a capability, the major for anything else),
write it into CHANGELOG.md, and renew the snapshot with

    RLCORE_UPDATE_SNAPSHOT=1 python -m pytest tests/core/spi/test_spi_snapshot.py
"""

import ast
import difflib
import json
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import rlcore.execution
import rlcore.schema.problem
import rlcore.spi
from rlcore.spi import ENTRY_POINT_GROUPS, OBSERVER_GROUP, SPI_VERSION, capabilities, errors

SOURCE = Path(rlcore.spi.__file__).parent
PROBLEM = Path(rlcore.schema.problem.__file__)
SNAPSHOT = Path(__file__).with_name("spi_snapshot.json")


def described(node: ast.stmt) -> Iterator[tuple[str, Any]]:
    """What one statement of a module or class adds to the interface, as source text without docstrings."""
    match node:
        case ast.ClassDef():
            yield node.name, described_class(node)
        case ast.FunctionDef() | ast.AsyncFunctionDef() if not node.name.startswith("_") or node.name == "__init__":
            yield node.name, described_function(node)
        case ast.AnnAssign(target=ast.Name(id=name)) if not name.startswith("_"):
            yield name, described_field(node)
        case ast.Assign(targets=[ast.Name(id=name)]) if not name.startswith("_"):
            yield name, ast.unparse(node.value)


def described_class(node: ast.ClassDef) -> dict[str, Any]:
    members = dict(item for statement in node.body for item in described(statement))
    return {
        "kind": " ".join([*(f"@{ast.unparse(decorator)}" for decorator in node.decorator_list), "class"]),
        "bases": [ast.unparse(base) for base in node.bases],
        "members": members,
    }


def described_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    decorators = "".join(f"@{ast.unparse(decorator)} " for decorator in node.decorator_list)
    prefix = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{decorators}{prefix} {node.name}({ast.unparse(node.args)}){returns}"


def described_field(node: ast.AnnAssign) -> str:
    default = f" = {ast.unparse(node.value)}" if node.value else ""
    return f"{ast.unparse(node.annotation)}{default}"


def public_names() -> list[str]:
    """What rlcore.spi exports."""
    return sorted(rlcore.spi.__all__)


def helpers() -> dict[str, Any]:
    """What rlcore.execution exports, from the modules that define it."""
    found: dict[str, Any] = {}
    for node in ast.parse(Path(rlcore.execution.__file__).read_text()).body:
        if isinstance(node, ast.ImportFrom):
            source = Path(import_module(str(node.module)).__file__ or "").read_text()
            defined = dict(item for statement in ast.parse(source).body for item in described(statement))
            found |= {alias.name: defined[alias.name] for alias in node.names}
    assert sorted(found) == sorted(rlcore.execution.__all__)
    return found


def interface() -> dict[str, Any]:
    """Everything that a plugin can see: public names by module, and the values that cross the boundary."""
    modules = {
        path.stem: dict(item for statement in ast.parse(path.read_text()).body for item in described(statement))
        for path in sorted(SOURCE.glob("*.py"))
        if path.stem != "__init__"
    }
    # Its names are those of rlcore.spi.errors too.
    modules["problem"] = dict(item for statement in ast.parse(PROBLEM.read_text()).body for item in described(statement))
    error_classes = [
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.RlcoreError)
    ]
    return {
        "version": list(SPI_VERSION),
        "public_names": public_names(),
        "capabilities": sorted(capabilities.KNOWN),
        "entry_point_groups": {**ENTRY_POINT_GROUPS, "observer": OBSERVER_GROUP},
        "exit_codes": {error.__name__: error.exit_code for error in error_classes},
        "modules": modules,
        "rlcore.execution": helpers(),
    }


def test_the_interface_equals_its_snapshot():
    found = json.dumps(interface(), indent=1, sort_keys=False) + "\n"
    if os.environ.get("RLCORE_UPDATE_SNAPSHOT"):
        SNAPSHOT.write_text(found)
    expected = SNAPSHOT.read_text()
    lines = difflib.unified_diff(expected.splitlines(), found.splitlines(), "snapshot", "now", lineterm="", n=2)
    assert found == expected, "the SPI has changed; this file's first lines say what to do:\n" + "\n".join(lines)


def test_the_snapshot_sees_every_kind_of_change():
    """The description itself: a hook's signature, a field's type and default, a constant, an enum's member."""
    modules = interface()["modules"]
    step = modules["trainer"]["TrainerSpec"]["members"]["train_step"]
    assert step == "@hookspec(firstresult=True) def train_step(self, request: TrainStepRequest) -> TrainStepResult"
    assert modules["trainer"]["TrainStepRequest"]["members"]["microbatches"] == "tuple[TokenBatch, ...]"
    assert modules["generator"]["SamplingParams"]["members"]["top_p"] == "float = 1.0"
    assert modules["generator"]["FinishReason"]["members"] == {"STOP": "0", "LENGTH": "1", "ABORTED": "2"}
    assert modules["environment"]["Environment"]["members"]["reset"].startswith("async def reset(self, row: Row")
    assert modules["batch"]["ADVANTAGES"] == "'advantages'"


def test_every_public_name_is_there_and_listed_once():
    assert len(public_names()) == len(set(public_names()))
    assert all(hasattr(rlcore.spi, name) for name in public_names())
