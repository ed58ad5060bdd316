"""Restarts in a thread: who begins one goes on, and who needs the engines waits."""

import threading

import pytest

from rlcore_vllm.replicas.background_restart import BackgroundRestart


def test_the_lock_is_held_until_it_has_ended_and_a_failure_is_told(caplog: pytest.LogCaptureFixture) -> None:
    changing, may_end, log = threading.Lock(), threading.Event(), []
    restart = BackgroundRestart(changing)

    def fail() -> None:
        assert may_end.wait(300)
        log.append("restarted")
        raise ValueError("the device is gone")

    restart.begin(lambda: fail)
    assert (changing.locked(), restart.is_under_way, log) == (True, True, [])
    may_end.set()
    restart.end()
    assert (changing.locked(), restart.is_under_way, log) == (False, False, ["restarted"])
    assert "the device is gone" in caplog.text


def test_one_that_begins_while_another_is_under_way_is_claimed_at_once_and_done_under_the_same_hold() -> None:
    changing, may_end, log = threading.Lock(), threading.Event(), []
    restart = BackgroundRestart(changing)
    restart.begin(lambda: lambda: log.append(may_end.wait(300)))
    restart.begin(lambda: log.append("claimed") or (lambda: log.append(changing.locked())))
    assert log == ["claimed"]
    may_end.set()
    restart.end()
    assert log == ["claimed", True, True]


def test_many_threads_begin_and_each_restart_is_made_once() -> None:
    changing, log = threading.Lock(), []
    restart = BackgroundRestart(changing)
    barrier = threading.Barrier(16)

    def begin(number: int) -> None:
        barrier.wait(300)
        restart.begin(lambda: lambda: log.append((number, changing.locked())))

    threads = [threading.Thread(target=begin, args=[number]) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    restart.end()
    assert sorted(log) == [(number, True) for number in range(16)]


def test_none_begins_after_the_end() -> None:
    restart = BackgroundRestart(threading.Lock())
    log: list[str] = []
    restart.end()
    restart.begin(lambda: log.append("claimed") or (lambda: log.append("restarted")))
    restart.end()
    assert (log, restart.is_under_way) == ([], False)
