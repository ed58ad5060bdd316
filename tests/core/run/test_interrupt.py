"""Ctrl-C ends a part that may be cut at once, and one that may not at its end."""

import os
import signal

import pytest

from rlcore.run.interrupt import InterruptGuard, ended_by_sigterm, sigterm_kept


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_outside_a_deferred_part_it_ends_at_once() -> None:
    guard, reached = InterruptGuard(), []
    with pytest.raises(KeyboardInterrupt), guard.entered():
        press()
        reached.append("after")
    assert reached == []
    assert not guard.torn


def test_sigterm_ends_what_has_no_guard_yet_also_where_a_library_takes_it() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ended_by_sigterm():
        with sigterm_kept():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt), sigterm_kept():
            raise SystemExit(signal.SIGTERM)  # as Ray's handler does
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_deferred_part_is_finished_first(number: signal.Signals) -> None:
    guard, reached = InterruptGuard(), []
    with pytest.raises(KeyboardInterrupt), guard.entered(), guard.deferred():
        with guard.deferred():
            os.kill(os.getpid(), number)
            reached.append("inner")
        reached.append("outer")
    assert reached == ["inner", "outer"]
    assert not guard.torn


def test_a_second_one_tears_the_deferred_part() -> None:
    guard, reached = InterruptGuard(), []
    with pytest.raises(KeyboardInterrupt), guard.entered(), guard.deferred():
        press()
        press()
        reached.append("after")
    assert reached == []
    assert guard.torn


def test_a_third_one_does_not_make_a_torn_part_whole() -> None:
    guard = InterruptGuard()
    with pytest.raises(KeyboardInterrupt), guard.entered():
        try:
            with guard.deferred():
                press()
                press()
        finally:
            press()
    assert guard.torn


class PressesWhenFreed:
    def __del__(self) -> None:
        press()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_one_that_python_dropped_ends_the_next_part_before_it_begins() -> None:
    guard, reached = InterruptGuard(), []
    with pytest.raises(KeyboardInterrupt), guard.entered():
        PressesWhenFreed()  # Python prints what a finalizer raises, and goes on
        reached.append("after")
        with guard.deferred():
            reached.append("inside")
    assert reached == ["after"]
    assert not guard.torn
    with guard.deferred():
        reached.append("saved")
    assert reached == ["after", "saved"]


def test_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with InterruptGuard().entered():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
