"""The card of an exported model; tests/system/test_hub.py has the whole card of a run."""

import os
from collections.abc import Callable
from pathlib import Path

from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.storage.run_directory import RunDirectory
from rlcore_hub.model_card import write_model_card

from ..core.run.conftest import prepared as prepared  # type: ignore[import-not-found]


def test_the_card_shows_the_pictures_that_sinks_drew_at_the_end(prepared: Callable[..., RunPlan], tmp_path: Path) -> None:
    directory, exported = RunDirectory(path=tmp_path / "run"), tmp_path / "model"
    directory.path.mkdir()
    exported.mkdir()
    directory.write_summary({})
    for name, age_s in (("curve.png", -1), ("earlier.png", 1)):
        (directory.path / name).write_text(name)
        end = directory.summary_file.stat().st_mtime
        os.utime(directory.path / name, (end - age_s, end - age_s))
    write_model_card(prepared(), directory, exported, {"steps": 1})
    assert "![curve of the run](curve.png)" in (exported / "README.md").read_text()
    assert {path.name for path in exported.iterdir()} == {"README.md", "curve.png"}
