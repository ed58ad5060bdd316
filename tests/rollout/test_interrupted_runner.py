"""Ctrl-C at any line by which work begins: an error, and nothing of it goes on."""

import asyncio
import itertools
import sys
import threading
import time

import pytest

from rlcore_rollout.environment_runner import EpisodeRunner

from .test_environment_runner import StepEnvironment, done, turn


class Interrupt:
    """Ctrl-C at the n-th line that the thread executes as it begins work, behind what comes first."""

    FUNCTIONS = ("drive", "work", "start", "submit", "run_coroutine_threadsafe")

    def __init__(self, at, first):
        self.at, self.first, self.lines = at, first, 0

    def __call__(self, frame, event, _):
        if frame.f_code.co_name not in self.FUNCTIONS or frame.f_globals["__name__"] == "threading":
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                self.first()
                raise KeyboardInterrupt
        return self


def tasks_on(loop):
    async def counted():
        return len(asyncio.all_tasks()) - 1

    return asyncio.run_coroutine_threadsafe(counted(), loop).result(300)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.own_process
def test_ctrl_c_at_any_moment_of_the_beginning_leaves_nothing_at_work():
    handed, begun, number_begun = threading.Event(), threading.Event(), 0

    async def forever(_state):
        begun.set()
        await asyncio.Event().wait()

    def waiting():
        runner = EpisodeRunner(StepEnvironment(forever), 3600.0)
        loop, handed_over = runner.thread().loop, runner.thread().loop.call_soon_threadsafe

        def hand_over(*arguments, **options):
            handed.set()
            return handed_over(*arguments, **options)

        loop.call_soon_threadsafe = hand_over
        return runner

    def interrupted(runner, at):
        handed.clear()
        begun.clear()
        before = sys.gettrace()
        sys.settrace(Interrupt(at, lambda: handed.is_set() and begun.wait(300)))
        try:
            runner.step_all([0], [turn()])
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    for at in itertools.count(1):
        runner = EpisodeRunner(StepEnvironment(lambda _: done(1.0)), 3600.0)
        if not interrupted(runner, at):
            break  # all of its lines were interrupted
        runner = waiting()
        assert interrupted(runner, at)
        number_begun += begun.is_set()
        deadline = time.monotonic() + 300
        while (left := tasks_on(runner.thread().loop)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert left == 0
        runner.close()
    assert at > 10
    assert number_begun >= 2  # once before the driver has what it cancels by
