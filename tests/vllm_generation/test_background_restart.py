"""Restarts in a thread: who begins one goes on, and who needs the engines waits."""

import threading

import pytest

from rlcore_vllm.background_restart import BackgroundRestart


def test_the_lock_is_held_until_it_has_ended_and_a_failure_is_told(caplog: pytest.LogCaptureFixture) -> None:
    changing, may_end, log = threading.Lock(), threading.Event(), []
    restart = BackgroundRestart(changing)

    def fail() -> None:
        assert may_end.wait(60)
        log.append("restarted")
        raise ValueError("the device is gone")

    restart.join()  # there is none yet
    restart.begin(fail)
    assert (changing.locked(), restart.is_under_way, log) == (True, True, [])
    may_end.set()
    restart.join()
    assert (changing.locked(), restart.is_under_way, log) == (False, False, ["restarted"])
    assert "the device is gone" in caplog.text
