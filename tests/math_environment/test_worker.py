"""The processes that judge answers: their time, their memory, their ends."""

import contextlib
import json
import os
import signal
import time

import pytest

from rlcore_math.worker import Child, Limits, ask_child


@pytest.fixture
def judged_by(monkeypatch):
    """A child of a worker in which a function of the test judges."""
    children = []

    def make(judge, timeout_s=0.3):
        monkeypatch.setattr("rlcore_math.answers.judge", lambda *_, **__: judge())
        children.append(Child(Limits(timeout_s=timeout_s, max_memory_bytes=2**40)))
        return children[-1]

    yield make
    for child in children:
        with contextlib.suppress(ChildProcessError):
            child.ended_by()


REQUEST = json.dumps({"reference": "1", "response": "1", "require_boxed": False}) + "\n"


def compute(seconds):
    start = time.process_time()
    while time.process_time() - start < seconds:
        pass
    return "right"


def test_time_is_the_processors_so_that_a_busy_machine_makes_no_answer_slow(judged_by):
    def wait():
        time.sleep(1.0)
        return "right"

    assert json.loads(judged_by(wait).ask(REQUEST)) == {"verdict": "right"}
    endless = judged_by(lambda: compute(60))
    assert endless.ask(REQUEST) is None
    assert endless.ended_by() == -signal.SIGPROF


def test_a_costly_answer_leaves_nothing_behind(judged_by):
    child = judged_by(lambda: compute(0.3), timeout_s=5.0)
    assert json.loads(child.ask(REQUEST)) == {"verdict": "right"}
    assert child.ask(REQUEST) is None
    assert child.ended_by() == 0


@pytest.mark.parametrize(
    ("judge", "verdict"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "failed"),
        (lambda: 1 // 0, "failed"),
        (lambda: compute(60), "too_slow"),
    ],
)
def test_what_ends_a_child_is_told_apart(judged_by, judge, verdict):
    # A crash costs the system time of its own, which counts.
    timeout_s = 1.0 if verdict == "too_slow" else 60.0
    answer, child = ask_child(REQUEST, judged_by(judge, timeout_s), Limits(timeout_s=timeout_s, max_memory_bytes=2**40))
    assert json.loads(answer) == {"verdict": verdict}
    assert child is None
