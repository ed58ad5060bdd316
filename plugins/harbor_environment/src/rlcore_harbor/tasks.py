"""Folders of Harbor tasks as rows."""

from collections.abc import Sequence
from pathlib import Path

from rlcore.reading import read_toml
from rlcore.schema.file_limits import expanded
from rlcore.spi import DataError, LazyRows, Row

FILE = "task.toml"
INSTRUCTION = "instruction.md"
EXPECTED = f"a folder of Harbor tasks, each with a {FILE}"


def task_folders(folder: str) -> Sequence[Path]:
    """Return the folders of the tasks in a folder by their names, or the folder itself where it is a task."""
    path = expanded(folder)
    if (path / FILE).is_file():
        return [path]
    return sorted(file.parent for file in path.glob(f"*/{FILE}"))


def read_rows(folder: str, key: str, field: str) -> Sequence[Row]:
    """Return a row for each task: the path of its folder as `field`, its name and its instruction. DataError where there is no
    task."""
    folders = task_folders(folder)
    if not folders:
        raise DataError(f"{key}: found no task in {folder}; expected {EXPECTED}")
    return LazyRows(len(folders), lambda index: _row(folders[index], field))


def task_of(row: Row, field: str) -> Path:
    """Return the folder of a row's task. DataError where the row names none that there is."""
    name = row.get(field)
    if not isinstance(name, str):
        fields = ", ".join(map(repr, row)) or "none"
        raise DataError(f"found a row with the fields {fields}; expected {field!r} with the folder of a Harbor task")
    if not (expanded(name) / FILE).is_file():
        raise DataError(f"found {name!r} as {field!r} of a row; expected the folder of a Harbor task, with a {FILE}")
    return expanded(name)


def _row(folder: Path, field: str) -> Row:
    return {field: str(folder), "name": folder.name, "instruction": _instruction(folder)}


def _instruction(folder: Path) -> str:
    """Return a task's instruction, those of all steps where it has steps."""
    files = [folder / INSTRUCTION]
    if not files[0].is_file():
        steps = read_toml(folder / FILE, DataError).get("steps", [])
        files = [folder / "steps" / str(step.get("name")) / INSTRUCTION for step in steps] or files
    try:
        return "\n\n".join(file.read_text() for file in files)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the instruction of the task {folder}: {error}; expected {INSTRUCTION}") from error
