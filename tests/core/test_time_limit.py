"""Foreign code that takes too long is ended and named."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest

from rlcore import time_limit as limits
from rlcore.time_limit import FalseInterruptError, LateError, load_seconds, loading, time_limit


def sleep() -> None:
    time.sleep(60)


def loop() -> None:
    while True:
        pass


def stubborn() -> None:
    """Holds up what ends it, once."""
    try:
        sleep()
    except BaseException:
        sleep()


def swallowing() -> None:
    with suppress(BaseException):
        loop()


def in_thread(function: Callable[[], None]) -> None:
    """Run a function in another thread, and raise what it raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(300)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.fixture(autouse=True)
def the_signal_is_left_as_it_was() -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    yield
    assert signal.getsignal(signal.SIGALRM) is before


@pytest.mark.parametrize("late", [sleep, loop, stubborn, swallowing])
def test_what_is_late_in_the_main_thread_is_ended(late: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "AGAIN_S", 0.02)
    with pytest.raises(LateError, match=r"the plugin 'x' .* 0\.05 s"), time_limit("the plugin 'x'", 0.05):
        late()


@pytest.mark.parametrize("late", [loop, swallowing])
def test_what_is_late_in_another_thread_is_ended(late: Callable[[], None]) -> None:
    def run() -> None:
        with time_limit("the template", 0.05):
            late()

    with pytest.raises(LateError, match=r"the template .* 0\.05 s"):
        in_thread(run)


def test_the_line_that_was_late_is_named() -> None:
    with pytest.raises(LateError, match=rf"in {__name__}, line {loop.__code__.co_firstlineno + 1}"), time_limit("it", 0.05):
        loop()


@pytest.mark.parametrize("where", [in_thread, lambda function: function()])
def test_what_is_in_time_is_left_alone(where: Callable[[Callable[[], None]], None]) -> None:
    def run() -> None:
        with time_limit("it", 60):
            pass
        with pytest.raises(KeyError), time_limit("it", 60):
            raise KeyError

    where(run)


@pytest.mark.parametrize(("outer", "inner", "late"), [(0.05, 60, "outer"), (60, 0.05, "inner")])
def test_of_two_limits_the_first_that_is_reached_counts(outer: float, inner: float, late: str) -> None:
    with pytest.raises(LateError, match=f"the {late}"), time_limit("the outer", outer), time_limit("the inner", inner):
        sleep()


def test_an_alarm_of_others_rings_at_its_time() -> None:
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    running = signal.setitimer(signal.ITIMER_REAL, 0.02)
    try:
        with time_limit("it", 60):
            while not rung:
                time.sleep(0.001)
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with time_limit("it", 60):
            pass
        while len(rung) < 2:
            time.sleep(0.001)
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, running[0])


def test_what_takes_long_is_told_before_it_is_ended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "NOTICE_S", 0.02)
    with pytest.raises(LateError), time_limit("the plugin 'x'", 0.1):
        sleep()
    assert capsys.readouterr().err == "rlcore: the plugin 'x' takes long; 0.1 s is the limit\n"


@pytest.mark.parametrize(("value", "expected"), [(None, 60.0), ("300", 300.0), ("0", 1.0), ("soon", 60.0)])
def test_the_limit_on_loading_is_the_environments(value: str | None, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is not None:
        monkeypatch.setenv("RLCORE_LOAD_TIMEOUT_S", value)
    assert load_seconds() == expected


def test_loading_says_how_to_allow_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOAD_S", 0.05)
    with pytest.raises(LateError, match="RLCORE_LOAD_TIMEOUT_S sets another limit"), loading("the plugin"):
        sleep()


def replaced() -> None:
    """Set a handler of its own, as some libraries do when they are imported."""

    def handler(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handler)
    signal.raise_signal(signal.SIGINT)


def claimed() -> None:
    raise KeyboardInterrupt("claimed")


@pytest.mark.parametrize(
    ("where", "code", "expected"),
    [
        (None, partial(signal.raise_signal, signal.SIGINT), KeyboardInterrupt),
        (None, replaced, KeyboardInterrupt),
        (None, claimed, FalseInterruptError),
        (in_thread, claimed, FalseInterruptError),
    ],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_only_a_signal_interrupts(where: object, code: Callable[[], None], expected: type[BaseException], depth: int) -> None:
    """The process's handlers are the same afterwards; code that sets one of its own keeps it."""

    def run(depth: int = depth) -> None:
        with time_limit("it", 60):
            code() if depth == 1 else run(depth - 1)

    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(expected, match=None if expected is KeyboardInterrupt else "it raised KeyboardInterrupt.*, line"):
            in_thread(run) if where else run()
        assert (signal.getsignal(signal.SIGINT) is before) is (code is not replaced)
    finally:
        signal.signal(signal.SIGINT, before)


class Interrupted(BaseException):
    """The error that a handler of a signal raises."""


@pytest.mark.parametrize("where", [in_thread, lambda function: function()])
def test_a_signal_in_the_midst_of_it_leaves_no_alarm(
    where: Callable[[Callable[[], None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = (limits.SignalAlarm, limits.ThreadAlarm)
    clears = {kind: kind.clear for kind in kinds}
    calls: list[object] = []

    def clear(alarm: limits.SignalAlarm) -> None:
        calls.append(alarm)
        if len(calls) == 1:
            raise Interrupted
        clears[type(alarm)](alarm)  # type: ignore[index]

    for kind in kinds:
        monkeypatch.setattr(kind, "clear", clear)

    def run() -> None:
        with time_limit("it", 60):
            pass

    with pytest.raises(Interrupted):
        where(run)
    (alarm,) = set(calls)
    assert not alarm.is_set  # type: ignore[attr-defined]


def test_a_block_that_has_ended_is_not_interrupted_on_its_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """No `try` of time_limit's surrounds the lines of contextlib by which a block is left: what is raised there escapes."""
    block, now = time_limit("the block", 5), time.monotonic
    block.__enter__()
    with monkeypatch.context() as late:
        late.setattr(limits, "time", SimpleNamespace(monotonic=lambda: now() + 6))
        late.setattr(signal, "setitimer", lambda *_: (0.0, 0.0))  # the alarm rings once
        with pytest.raises(TypeError):  # of contextlib, which gets no exception from what it takes for a class of one
            block.__exit__(partial(signal.raise_signal, signal.SIGALRM), None, None)  # type: ignore[arg-type]  # called in its frame
    block.gen.close()  # type: ignore[attr-defined]
