"""Pools of processes, as README.md shows one: answers, processes that die, calls that are cancelled, and nothing left."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlcore.spi import PluginError
from rlcore_workers.pool import MAX_STARTS, WorkerPool, default_processes
from rlcore_workers.process import Ended, Task

SOURCE = """
import os, signal, subprocess, time

def handle(argument, request):
    if request == "hang":
        subprocess.Popen(["sleep", "60"])
        time.sleep(600)
    if request == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if request == "die whole":
        with open(__file__ + ".tried", "a") as file:
            file.write("x")
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    print("printed")
    return (argument, request, os.getppid())

def fail():
    raise ValueError("no library")
"""


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPool]:
    (tmp_path / "pooled.py").write_text(SOURCE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    made = WorkerPool(Task(name="pooled", handle="pooled:handle", argument="it"), 1)
    yield made
    made.close()
    assert not own_processes()


def own_processes() -> list[psutil.Process]:
    """The processes of pools, with all that these have started."""
    mine = [one for one in psutil.Process().children() if one.cmdline()[-1:] == ["pooled"]]
    return mine + [child for one in mine for child in one.children(recursive=True)]


def test_a_process_answers_until_the_pool_is_closed_and_another_after_that(pool: WorkerPool) -> None:
    first, second = asyncio.run(pool.call(1)), asyncio.run(pool.call(2))
    assert first[:2] == ("it", 1)
    assert first[2] == second[2]
    pool.close()
    assert not own_processes()
    assert asyncio.run(pool.call(3))[2] != first[2]


def test_a_request_that_ends_its_process_costs_itself_alone(pool: WorkerPool) -> None:
    assert asyncio.run(pool.call("die")) == Ended(-signal.SIGSEGV)
    assert asyncio.run(pool.call("die whole")) == Ended(-signal.SIGKILL)
    assert asyncio.run(pool.call("next"))[1] == "next"


@pytest.mark.parametrize(("is_tried_once", "times"), [(True, 1), (False, MAX_STARTS)])
def test_a_request_whose_process_is_killed_is_tried_again_or_not(
    pool: WorkerPool, tmp_path: Path, is_tried_once: bool, times: int
) -> None:
    once = WorkerPool(Task(name="pooled", handle="pooled:handle", is_tried_once=is_tried_once), 1)
    assert asyncio.run(once.call("die whole")) == Ended(-signal.SIGKILL)
    once.close()
    assert (tmp_path / "pooled.py.tried").read_text() == times * "x"


def test_a_cancelled_call_is_killed_with_all_that_it_started(pool: WorkerPool) -> None:
    async def cancelled() -> None:
        call = asyncio.create_task(pool.call("hang"))
        while not any(one.name() == "sleep" for one in own_processes()):
            await asyncio.sleep(0.01)
        processes = own_processes()
        waiting = asyncio.create_task(pool.call("waiting"))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        psutil.wait_procs(processes, 10)
        assert not [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        assert (await waiting)[1] == "waiting"

    asyncio.run(cancelled())


def test_closing_ends_what_hangs(pool: WorkerPool) -> None:
    async def closed() -> object:
        call = asyncio.create_task(pool.call("hang"))
        while not own_processes():
            await asyncio.sleep(0.01)
        await asyncio.to_thread(pool.close)
        return await call

    assert asyncio.run(closed()) == Ended(-signal.SIGKILL)


def test_what_cannot_be_sent_is_an_error_and_costs_nothing_else(pool: WorkerPool) -> None:
    with pytest.raises((AttributeError, TypeError), match="lambda|pickle"):
        asyncio.run(pool.call(lambda: 1))
    assert asyncio.run(pool.call("next"))[1] == "next"


def test_what_does_not_start_says_why(pool: WorkerPool) -> None:
    broken = WorkerPool(Task(name="pooled", handle="pooled:handle", prepare="pooled:fail"), 1)
    with pytest.raises(PluginError, match="(?s)'pooled'.*ValueError: no library"):
        asyncio.run(broken.call(1))
    broken.close()


@pytest.mark.parametrize("shows", [True, False])
def test_what_is_printed_goes_to_standard_error_or_nowhere(
    pool: WorkerPool, shows: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    assert pool is not None
    printing = WorkerPool(Task(name="pooled", handle="pooled:handle", shows_output=shows), 1)
    asyncio.run(printing.call(1))
    printing.close()
    assert capfd.readouterr().err.count("printed") == shows


def test_one_process_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)))
    assert default_processes() == 7
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(99)))
    assert default_processes() == 32
