"""The children that compute: their time, their memory, their ends."""

import contextlib
import os
import pickle
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlcore_workers.process import MAX_KILLS, Child, Ended, Limits, Task, ask_child, ending, main

HANDLE = f"{__name__}:handle"
REQUEST = pickle.dumps("one")


def handle(argument: Callable[[], Any], _: str) -> Any:
    return argument()


def compute(seconds: float) -> str:
    start = time.process_time()
    while time.process_time() - start < seconds:
        pass
    return "done"


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    """Makes a child in which a function of the test computes."""
    children = []

    def make(function: Callable[[], Any], **limits: Any) -> Child:
        children.append(Child(Task(name="test", handle=HANDLE, argument=function, limits=Limits(**limits))))
        return children[-1]

    yield make
    for one in children:
        with contextlib.suppress(ChildProcessError):
            one.ended_by()


def test_time_is_the_processors_so_that_a_busy_machine_makes_no_answer_slow(child: Callable[..., Child]) -> None:
    waiting = child(lambda: time.sleep(0.5) or "done", cpu_time_s=0.3)
    assert pickle.loads(waiting.ask(REQUEST) or b"") == "done"
    endless = child(lambda: compute(60), cpu_time_s=0.3)
    assert endless.ask(REQUEST) is None
    assert endless.ended_by() == -signal.SIGPROF


def test_a_costly_answer_leaves_nothing_behind(child: Callable[..., Child]) -> None:
    costly = child(lambda: compute(0.1), costly_s=0.05)
    assert pickle.loads(costly.ask(REQUEST) or b"") == "done"
    assert costly.ask(REQUEST) is None
    assert costly.ended_by() == 0


def test_a_child_answers_so_many_requests(child: Callable[..., Child]) -> None:
    twice = child(os.getpid, max_requests=2)
    answers = [twice.ask(REQUEST) for _ in range(3)]
    assert answers[0] == answers[1]
    assert answers[2] is None


def test_memory_is_limited(child: Callable[..., Child]) -> None:
    limited = child(lambda: resource.getrlimit(resource.RLIMIT_DATA), max_memory_bytes=2**30)
    assert pickle.loads(limited.ask(REQUEST) or b"") == (2**30, 2**30)


@pytest.mark.parametrize(
    ("function", "exit_code"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), -signal.SIGSEGV),
        (lambda: os._exit(3), 3),
        (lambda: 1 // 0, 1),
    ],
)
def test_what_ends_a_child_is_told_apart(
    child: Callable[..., Child], function: Callable[[], Any], exit_code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    task = Task(name="test", handle=HANDLE, argument=function)
    answer, left = ask_child(REQUEST, child(function), task)
    assert (pickle.loads(answer), left) == (Ended(exit_code), None)
    capfd.readouterr()


@pytest.mark.parametrize(("is_tried_once", "times"), [(True, 1), (False, MAX_KILLS + 1)])
def test_a_request_whose_process_is_killed_is_tried_again_or_not(tmp_path: Path, is_tried_once: bool, times: int) -> None:
    def killed() -> None:
        with (tmp_path / "tried").open("a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)

    task = Task(name="test", handle=HANDLE, argument=killed, is_tried_once=is_tried_once)
    answer, _ = ask_child(REQUEST, None, task)
    assert pickle.loads(answer) == Ended(-signal.SIGKILL)
    assert (tmp_path / "tried").read_text() == times * "x"


def test_endings_are_named() -> None:
    assert [ending(code) for code in (0, 3, -9, -40)] == ["exit code 0", "exit code 3", "signal SIGKILL", "signal 40"]


def hang(file: str, _: str) -> None:
    """Starts a program beside itself, and never answers."""
    with Path(file).open("w") as numbers:
        numbers.write(f"{os.getpid()} {subprocess.Popen(['sleep', '60']).pid}\n")
    time.sleep(60)


def test_a_process_whose_caller_is_gone_ends_with_all_it_started(tmp_path: Path) -> None:
    file = tmp_path / "numbers"
    ours, theirs = Pipe()
    if (process := os.fork()) == 0:
        ours.close()
        os.setsid()
        main([str(theirs.fileno())])
    theirs.close()
    ours.send(Task(name="test", handle=f"{__name__}:hang", argument=str(file)))
    assert ours.recv() is None
    ours.send("one")
    while not (file.exists() and file.read_text().endswith("\n")):
        time.sleep(0.01)
    ours.close()
    assert os.waitpid(process, 0)[1] == signal.SIGKILL
    for number in map(int, file.read_text().split()):
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(number).wait(300)
