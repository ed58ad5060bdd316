"""The class of plugins/report/README.md is accepted, and its methods print what the run gives them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from markdown_blocks import ROOT, write_files

from rlcore_report.callbacks import callback_problems
from rlcore_report.callbacks_config import CallbacksConfig
from rlcore_workers.functions import load_function


def test_the_class_follows_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(ROOT / "plugins" / "report" / "README.md", tmp_path)
    path = f"{tmp_path}/callbacks.py:Watch"
    plan: Any = SimpleNamespace(recipe=SimpleNamespace(tables={"callbacks": CallbacksConfig(path=path)}))
    assert not list(callback_problems(plan))
    watch = load_function(path, "callbacks.path")()
    watch.on_step_end(3, {"reward_mean": 0.5})
    watch.on_save(3, Path("step-000003"))
    assert capsys.readouterr().out == "3 0.5\nsaved step-000003\n"
