"""The stacks of a rank that hangs in native code, in the error and in the rank's log."""

import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.spi import WorkerError
from rlcore_ray.rank_stacks import stacks_of_ranks

is_installed = Path(sysconfig.get_path("scripts"), "py-spy").is_file() or shutil.which("py-spy") is not None
pytestmark = [
    pytest.mark.usefixtures("local_ray"),
    pytest.mark.skipif(not is_installed, reason="py-spy is not installed"),
]
OPTIONS = (
    "cluster.gpus_per_node=2",
    "cluster.call_timeout_s=8",
    "cluster.max_restarts=0",
    "evaluation.at_start=false",
    'trainer.ranked.fault.kind="native"',
    'trainer.ranked.fault.hook="train_step"',
    "trainer.ranked.fault.rank=1",
    "trainer.ranked.fault.version=2",
)
FRAMES = ("nanosleep (libc", "stand_still_with_pythons_lock (ranked_fakes.py:", "Worker.train_step (rlcore_ray/worker.py:")
"""Functions of the stack: of C, of the plugin, of the worker that called it."""


def test_a_rank_that_holds_pythons_lock_in_c_is_shown_down_to_c(run: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as caught:
        run(*OPTIONS)
    message = str(caught.value)
    assert "which does not answer at all" in message
    _, _, of_rank_1 = message.partition("The stacks of process")[2].partition("\nrank 1 (node 127.0.0.1, process ")
    assert [frame for frame in FRAMES if frame not in of_rank_1] == []
    log = (tmp_path / "runs/run/logs/rank-1.log").read_text()
    assert [frame for frame in FRAMES if frame not in log] == []


def test_no_rank_has_no_stacks() -> None:
    assert stacks_of_ranks([]) == ""
