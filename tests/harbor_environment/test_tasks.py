"""Folders of tasks as rows."""

from pathlib import Path

import pytest

from rlcore.spi import DataError, EnvironmentContext
from rlcore_harbor.config import HarborConfig
from rlcore_harbor.environment import HarborBackend
from rlcore_harbor.tasks import read_rows, task_of

from .trials import write_task


def test_rows_have_path_name_and_instruction(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_task(tmp_path / name)
    (tmp_path / "no-task").mkdir()
    expected = [{"task": str(tmp_path / name), "name": name, "instruction": "Say yes.\n"} for name in ("a", "b")]
    assert list(read_rows(str(tmp_path), "environment.harbor.tasks", "task")) == expected
    assert list(read_rows(str(tmp_path / "b"), "environment.harbor.tasks", "task")) == expected[1:]


def test_a_task_with_steps_has_all_instructions(tmp_path: Path) -> None:
    task = write_task(tmp_path / "a", toml='[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n')
    (task / "instruction.md").unlink()
    for name in ("one", "two"):
        (task / "steps" / name).mkdir(parents=True)
        (task / "steps" / name / "instruction.md").write_text(f"Do {name}.")
    [row] = read_rows(str(tmp_path), "environment.harbor.tasks", "task")
    assert row["instruction"] == "Do one.\n\nDo two."


def test_what_is_no_task_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"environment\.harbor\.tasks.*task\.toml"):
        read_rows(str(tmp_path), "environment.harbor.tasks", "task")
    with pytest.raises(DataError, match="'prompt'.*'path'"):
        task_of({"prompt": "a"}, "path")
    with pytest.raises(DataError, match=f"{tmp_path}.*task.toml"):
        task_of({"path": str(tmp_path)}, "path")
    (write_task(tmp_path / "a") / "instruction.md").unlink()
    with pytest.raises(DataError, match=r"instruction\.md"):
        read_rows(str(tmp_path), "environment.harbor.tasks", "task")[0]


def test_rows_come_from_folders_or_the_recipe(tmp_path: Path) -> None:
    write_task(tmp_path / "a")
    backend = HarborBackend(EnvironmentContext(seed=0), HarborConfig(evaluation_tasks=str(tmp_path)))
    assert backend.rows("train") is None
    assert len(backend.rows("evaluation") or ()) == 1
