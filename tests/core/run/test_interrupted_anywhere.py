"""Ctrl-C at any line of a run: it ends as one, nothing of it goes on, and the run ends as an undisturbed one when resumed."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from rlcore.spi import InterruptedRun

from .conftest import read_metrics  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]

NOT_OURS = ("rlcore.testing", "rlcore.spi")
AHEAD = (
    "async.max_staleness=2",
    "algorithm.fake.generation_ratio=true",
    "environment.fake.num_train_rows=128",
    "environment.fake.num_turns=3",
    "rollout.max_turns=3",
    "rollout.max_response_tokens=40",
    "training.minibatches_per_step=1",
)
PARTS = 8
"""Of the run's lines; Ctrl-C comes in the middle of each."""


class Lines:
    """Counts the lines of rlcore that the main thread executes, and sends SIGINT at one of them."""

    def __init__(self, at: int = -1) -> None:
        self.number, self._at = 0, at

    def __call__(self, frame: FrameType, event: str, _: Any) -> "Lines | None":
        name = frame.f_globals.get("__name__", "")
        if not name.startswith("rlcore.") or name.startswith(NOT_OURS):
            return None
        if event == "line":
            self.number += 1
            if self.number == self._at:
                os.kill(os.getpid(), signal.SIGINT)
        return self

    def follow(self, function: Callable[[], Any]) -> None:
        """Call a function."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            function()
        finally:
            sys.settrace(before)


def threads_beside(before: set[threading.Thread]) -> set[threading.Thread]:
    """The threads that came since and have not ended within a minute."""
    deadline = time.monotonic() + 300
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def files(directory: Path) -> set[str]:
    """What is in a run's directory, but for which steps' checkpoints are kept."""
    names = {str(path.relative_to(directory)) for path in directory.rglob("*")}
    return {name for name in names if not name.startswith("checkpoints/step-")}


@pytest.mark.own_process
@pytest.mark.parametrize("options", [(), AHEAD], ids=["one step after another", "ahead"])
def test_wherever_ctrl_c_comes_the_run_ends_and_is_continued(run: Run, tmp_path: Path, options: tuple[str, ...]) -> None:
    whole, counted = tmp_path / "runs" / "whole", Lines()
    run("run.name=first", *options)  # some lines are executed once in a process
    counted.follow(lambda: run("run.name=whole", *options))
    ended_early = 0
    for part in range(PARTS):
        name, before = f"run.name=part-{part}", set(threading.enumerate())
        directory = tmp_path / "runs" / f"part-{part}"
        lines = Lines(counted.number * (2 * part + 1) // (2 * PARTS))
        try:
            lines.follow(lambda name=name: run(name, *options))  # type: ignore[misc]
        except (InterruptedRun, KeyboardInterrupt):  # the latter before the first step and behind the last
            ended_early += 1
        assert threads_beside(before) == set()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        run(name, *options, resume=any(directory.glob("checkpoints/step-*")))
        if not options:  # ahead, the schedule is that of the threads
            assert read_metrics(directory) == read_metrics(whole)
        assert len(read_metrics(directory)) == len(read_metrics(whole))
        assert files(directory) == files(whole)
    assert ended_early >= PARTS // 2  # as many lines as it was when they were counted no run need have
