"""Ranks in processes of their own: none is left behind."""

import os
import sys
import time
from pathlib import Path

import pytest
from torch.multiprocessing.spawn import ProcessContext

from rlcore_torchkit.testing.ranks import launch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


def note_and_wait(rank, directory):
    (directory / str(rank)).write_text(str(os.getpid()))
    time.sleep(60)


def pids(directory):
    while len(found := [path.read_text() for path in directory.iterdir()]) < 2 or not all(found):
        time.sleep(0.01)
    return [int(pid) for pid in found]


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def note_path(rank, directory):
    (directory / "path").write_text(os.environ["PYTHONPATH"])


def test_the_server_of_ranks_finds_the_modules_that_tests_find(tmp_path):
    """Or each rank would import for itself what was to be imported once."""
    launch(note_path, (tmp_path,), 1)
    assert str(HERE) in (tmp_path / "path").read_text().split(os.pathsep)
    assert str(HERE) not in os.environ.get("PYTHONPATH", "").split(os.pathsep)


@pytest.mark.parametrize("ending", [TimeoutError, KeyboardInterrupt])
def test_ranks_do_not_outlive_the_wait_for_them(tmp_path, monkeypatch, ending):
    """Neither where it took too long, nor where a signal ends it, as a test's own time limit does."""
    join = ProcessContext.join

    def once_all_run(context, timeout):
        pids(tmp_path)
        if ending is KeyboardInterrupt:
            raise KeyboardInterrupt
        return join(context, timeout)

    monkeypatch.setattr(ProcessContext, "join", once_all_run)
    with pytest.raises(ending):
        launch(note_and_wait, (tmp_path,), 2, timeout_s=0.01)
    assert not any(map(is_running, pids(tmp_path)))
