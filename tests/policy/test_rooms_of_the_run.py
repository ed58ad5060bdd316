"""The rooms of `rlcore.run`, its modules and folders: in which order they stand, and how many arrows run between them."""

import ast
import tomllib
from pathlib import Path

import pytest

MOST_ARROWS = 70


@pytest.fixture(scope="module")
def arrows(root: Path) -> set[tuple[str, str]]:
    """A room, and another of which it imports something: one arrow, however much that is."""
    run = root / "core" / "src" / "rlcore" / "run"
    rooms = {path.stem for path in run.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()} - {"__init__"}
    found = set()
    for path in run.rglob("*.py"):
        room = path.relative_to(run).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlcore.run"):
                names = node.module.split(".")[2:3] if node.module != "rlcore.run" else [alias.name for alias in node.names]
                found |= {(room, name) for name in names if name in rooms and name != room}
    return found


@pytest.fixture(scope="module")
def floors(root: Path) -> list[set[str]]:
    """The rooms of each floor, from the top down, as import-linter's contract has them."""
    linter = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = (contract for contract in linter["contracts"] if contract.get("containers") == ["rlcore.run"])
    return [{room.strip() for room in layer.split("|")} for layer in contract["layers"]]


def test_there_are_few_arrows_between_the_rooms(arrows: set[tuple[str, str]]) -> None:
    assert 20 < len(arrows) < MOST_ARROWS, sorted(arrows)


def test_no_arrow_runs_up_or_along_a_floor(arrows: set[tuple[str, str]], floors: list[set[str]]) -> None:
    floor_of = {room: number for number, rooms in enumerate(floors) for room in rooms}
    assert not [(room, other) for room, other in arrows if floor_of[room] >= floor_of[other]]


def test_the_floor_plan_has_the_rooms_in_this_order(root: Path, floors: list[set[str]]) -> None:
    text = (root / "docs" / "design.md").read_text()
    plan = text[text.index("## The floor plan") : text.index("## The interface")]
    cells = [line.split("|")[1] for line in plan.splitlines() if line.startswith("| `run/")]
    drawn = [name.strip("` /").removeprefix("run/").removesuffix(".py") for cell in cells for name in cell.split(",")]
    assert len(drawn) == len(set(drawn))
    floor_of = {room: number for number, rooms in enumerate(floors) for room in rooms}
    assert set(drawn) == set(floor_of)
    assert [floor_of[room] for room in drawn] == sorted(floor_of[room] for room in drawn)
