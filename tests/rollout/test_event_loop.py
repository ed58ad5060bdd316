"""An event loop in a thread: it runs what it is given, says where it is, and ends whatever runs on it."""

import asyncio
import threading
import time
from weakref import WeakSet

import pytest

from rlcore_rollout import event_loop
from rlcore_rollout.event_loop import LoopThread

LONG_S = 60.0


@pytest.fixture
def loop():
    """One that is closed in the end."""
    thread = LoopThread()
    yield thread
    thread.close()


def threads(name="environment-loop"):
    return {thread for thread in threading.enumerate() if thread.name == name}


def ended(before):
    """Whether the threads begun since have ended, after a while."""
    deadline = time.monotonic() + LONG_S
    while threads() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    return threads() <= before


async def nothing():
    pass


def test_coroutines_run_in_a_thread_of_their_own(loop):
    async def where():
        found.append(threading.current_thread().name)

    found = []
    assert loop.ends(loop.submit(where()), LONG_S)
    assert found == ["environment-loop"]


def test_what_is_not_done_in_time_goes_on(loop):
    async def waits():
        await event.wait()

    event = asyncio.Event()
    future = loop.submit(waits())
    assert not loop.ends(future, 0.01)
    loop.loop.call_soon_threadsafe(event.set)
    assert loop.ends(future, LONG_S)


def test_an_interrupt_in_a_task_is_raised_once_and_the_loop_goes_on(loop):
    async def interrupts():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop.ends(loop.submit(interrupts()), LONG_S)
        loop.ends(loop.submit(nothing()), LONG_S)
    assert loop.ends(loop.submit(nothing()), LONG_S)


def test_an_exit_in_a_task_does_not_end_the_thread(loop):
    async def leaves():
        raise SystemExit(3)

    assert loop.ends(loop.submit(leaves()), LONG_S)
    assert loop.ends(loop.submit(nothing()), LONG_S)


def test_it_says_which_line_runs(loop):
    async def blocks():
        begun.set()
        free.wait()

    begun, free = threading.Event(), threading.Event()
    future = loop.submit(blocks())
    assert begun.wait(LONG_S)
    where = loop.where()
    free.set()
    assert loop.ends(future, LONG_S)
    assert where.startswith("at ")
    assert " in " in where


def test_closing_cancels_what_runs_and_may_be_repeated():
    async def waits():
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    before, begun, cancelled = threads(), threading.Event(), threading.Event()
    loop = LoopThread()
    loop.submit(waits())
    assert begun.wait(LONG_S)
    loop.close()
    loop.close()
    assert cancelled.wait(LONG_S)
    assert ended(before)
    assert loop.where() == "at an unknown line"


def test_a_call_in_a_thread_holds_up_neither_others_nor_the_end():
    async def calls():
        await asyncio.to_thread(free.wait)

    before, free = threads(), threading.Event()
    loop = LoopThread()
    for _ in range(50):  # more than a pool of threads has
        loop.submit(calls())
    assert loop.ends(loop.submit(nothing()), LONG_S)
    loop.close()
    assert ended(before)
    assert all(thread.daemon for thread in threads("environment-call"))
    free.set()


@pytest.mark.parametrize("how", ["cancel", "close", "abandon"])
def test_a_call_in_a_thread_that_no_one_waits_for_is_ended(how, caplog):
    def computes():
        begun.set()
        while True:
            pass

    before, begun = threads("environment-call"), threading.Event()
    loop = LoopThread()
    future = loop.submit(asyncio.to_thread(computes))
    assert begun.wait(LONG_S)
    future.cancel() if how == "cancel" else getattr(loop, how)()
    deadline = time.monotonic() + LONG_S
    while threads("environment-call") - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads("environment-call") <= before
    loop.close()
    assert not caplog.records


def test_code_that_never_waits_is_ended(monkeypatch):
    monkeypatch.setattr(event_loop, "POLITE_S", 0.05)

    async def turns():
        begun.set()
        while True:
            pass

    before, begun = threads(), threading.Event()
    loop = LoopThread()
    loop.submit(turns())
    assert begun.wait(LONG_S)
    loop.abandon()
    assert ended(before)


def test_a_call_that_is_given_up_twice_ends_none_that_came_after_it():
    """A thread has the number of one that has ended, as a rule."""

    def waits():
        begun.release()
        free.wait()

    def goes_on():
        begun.release()
        while not over:
            pass
        ended.append(True)

    begun, free, over, ended, before = threading.Semaphore(0), threading.Event(), [], [], threads("environment-call")
    loop, other = LoopThread(), LoopThread()
    given_up = loop.submit(asyncio.to_thread(waits))
    assert begun.acquire(timeout=LONG_S)
    (thread,) = threads("environment-call") - before
    given_up.cancel()
    assert loop.ends(loop.submit(nothing()), LONG_S)
    free.set()
    thread.join(LONG_S)
    later = [other.submit(asyncio.to_thread(goes_on)) for _ in range(8)]
    assert all(begun.acquire(timeout=LONG_S) for _ in later)
    loop.close()
    time.sleep(0.05)
    over.append(True)
    assert all(other.ends(call, LONG_S) for call in later)
    assert len(ended) == 8
    other.close()


def test_calls_may_begin_while_others_are_given_up(monkeypatch):
    class Watched(WeakSet):
        def __iter__(self):
            for call in super().__iter__():
                looked_at.set()
                added.wait(0.2)
                yield call

    def waits():
        begun.release()
        free.wait()

    async def begins_another():
        looked_at.wait()
        call = asyncio.get_running_loop().run_in_executor(None, waits)
        added.set()
        await call

    monkeypatch.setattr(event_loop, "WeakSet", Watched)
    begun, free, looked_at, added = threading.Semaphore(0), threading.Event(), threading.Event(), threading.Event()
    before, loop = threads(), LoopThread()
    for _ in range(2):
        loop.submit(asyncio.to_thread(waits))
    assert all(begun.acquire(timeout=LONG_S) for _ in range(2))
    loop.submit(begins_another())
    try:
        loop.abandon()
    finally:
        free.set()
    assert ended(before)
