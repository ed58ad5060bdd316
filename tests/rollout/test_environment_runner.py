"""The environment runner: what an environment may do wrong, and that it ends in one clear error or a masked episode."""

import asyncio
import contextlib
import signal
import threading
import time
from concurrent.futures import CancelledError
from types import SimpleNamespace

import numpy as np
import pytest

from rlcore.spi import (
    ContractError,
    EpisodeResult,
    FinishReason,
    Observation,
    PluginError,
    ResetResult,
    RewardError,
    StepResult,
    Turn,
)
from rlcore.time_limit import LOAD_VARIABLE
from rlcore_rollout import environment_calls, environment_runner
from rlcore_rollout.environment_runner import EpisodeRunner, Failure

TIMEOUT_S = 0.3  # of calls that are late
AMPLE_S = 60.0


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(environment_calls, "GRACE_S", 0.3)


@pytest.fixture
def run():
    """Runs the given steps, one for each episode, and closes the runner."""
    runners = []

    def step_all(step, number=6, on_error="error", timeout_s=TIMEOUT_S):
        runners.append(EpisodeRunner(StepEnvironment(step), timeout_s, on_error))
        return runners[-1].step_all(list(range(number)), [turn(f"answer {index}") for index in range(number)])

    yield step_all
    for runner in runners:
        runner.close()


class StepEnvironment:
    """Scores the state, which is the episode's number, with the function given."""

    def __init__(self, step):
        self._step = step

    async def reset(self, row, seed):
        return ResetResult(observation=Observation(text=f"{row['prompt']} {seed}"), state=row)

    async def step(self, state, turn):
        result = self._step(state)
        return await result if asyncio.iscoroutine(result) else result

    def rows(self, split):
        return None


def turn(text=""):
    return Turn(text=text, tokens=np.zeros(1, np.int32), finish_reason=FinishReason.STOP)


def going(**observation):
    return StepResult(reward=1.0, done=False, observation=Observation(**observation))


def done(reward, **options):
    return StepResult(reward=reward, done=True, **options)


def failing_at(bad, *numbers):
    """A step that is good but for some episodes, where it is `bad`."""

    def step(state):
        return bad(state) if state in numbers else done(float(state))

    return step


def rewards(outcomes):
    return [outcome.reward if isinstance(outcome, StepResult) else None for outcome in outcomes]


def raising(state):
    raise KeyError(f"no answer {state}")


async def sleeping(_state):
    await asyncio.sleep(60)


async def sleeping_in_a_thread(_state):
    await asyncio.to_thread(time.sleep, 2)


def blocking(_state):
    while True:
        pass


def blocking_in_a_system_call(_state):
    time.sleep(3)


def blocking_for_a_moment(_state):
    time.sleep(0.45)
    return done(7.0)


async def uncancellable(_state):
    end = time.monotonic() + 3
    while time.monotonic() < end:
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            continue


def exiting(_state):
    raise SystemExit(3)


async def cancelling_itself(_state):
    raise asyncio.CancelledError


BAD_STEPS = [
    (raising, "raised KeyError: 'no answer 3'"),
    (lambda _: done(float("nan")), "returned the reward nan; expected a finite number"),
    (lambda _: done(np.float32("inf")), "returned the reward inf; expected a finite number"),
    (sleeping, r"took longer than 0\.3 s \(rollout\.environment_timeout_s\)"),
    (sleeping_in_a_thread, r"took longer than 0\.3 s"),
    (blocking, r"neither returned nor let itself be cancelled within 0\.3 s.*test_environment_runner\.py:\d+ in blocking"),
    (blocking_in_a_system_call, "neither returned nor let itself be cancelled"),
    # Which of the two is said depends on whether it returns before the watch looks.
    (blocking_for_a_moment, "neither returned nor let itself be cancelled|the event loop could not end it"),
    (uncancellable, "neither returned nor let itself be cancelled"),
    (exiting, "raised SystemExit: 3"),
    (cancelling_itself, "raised CancelledError"),
]
IDS = [
    "raises",
    "nan",
    "inf",
    "sleeps",
    "sleeps in thread",
    "blocks",
    "blocks in system call",
    "blocks for a moment",
    "uncancellable",
    "exits",
    "cancels itself",
]


@pytest.mark.parametrize(("bad", "reason"), BAD_STEPS, ids=IDS)
def test_a_bad_step_ends_the_run(run, bad, reason):
    with pytest.raises(RewardError, match=reason) as raised:
        run(failing_at(bad, 3))
    message = str(raised.value)
    assert "environment.step, episode 3 of 6 (response 'answer 3' to the task with state 3)" in message
    assert 'rollout.on_environment_error = "mask"' in message


@pytest.mark.parametrize(("bad", "reason"), BAD_STEPS, ids=IDS)
def test_bad_steps_are_masked_and_all_others_scored(run, bad, reason):
    outcomes = run(failing_at(bad, 1, 3), on_error="mask")
    assert rewards(outcomes) == [0.0, None, 2.0, None, 4.0, 5.0]
    failure = outcomes[3]
    assert isinstance(failure, Failure)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(failure.reason)


def test_the_cause_of_an_error_is_kept(run):
    with pytest.raises(RewardError) as raised:
        run(failing_at(raising, 2))
    cause = raised.value.__cause__
    assert isinstance(cause, KeyError)
    assert cause.__traceback__ is not None
    masked = run(failing_at(raising, 2), on_error="mask")[2]
    assert isinstance(masked.error, KeyError)


def test_a_token_that_the_model_does_not_have_is_the_environments():
    beyond = np.asarray([3, 102], np.int32)
    runner = EpisodeRunner(
        StepEnvironment(lambda _: going(tokens=beyond)), AMPLE_S, "mask", "environment 'acme'", vocab_size=102
    )
    with pytest.raises(ContractError, match="acme.* token 102; .* below 102"):
        runner.step_all([0], [turn()])
    runner.close()


@pytest.mark.parametrize("on_error", ["error", "mask"])
def test_a_broken_contract_is_an_error_even_where_failures_are_masked(run, on_error):
    with pytest.raises(ContractError, match=r"environment\.step, episode 0 of 2 .*returned NoneType"):
        run(lambda _: None, number=2, on_error=on_error)


def test_figures_that_are_not_finite_are_failures_of_the_environment():
    runner = EpisodeRunner(StepEnvironment(lambda _: done(1e300)), AMPLE_S, owner="environment 'acme' (acme 1.0)")
    with pytest.raises(RewardError, match=r"environment 'acme' \(acme 1\.0\)\.step, episode 0 .* reward 1e\+300"):
        runner.step_all([0], [turn()])
    runner.close()
    masking = EpisodeRunner(StepEnvironment(lambda _: done(1e300)), AMPLE_S, "mask")
    assert isinstance(masking.step_all([0], [turn()])[0], Failure)
    masking.close()


def test_functions_that_are_not_async_break_the_contract():
    class Plain:
        def step(self, state, turn):
            return done(1.0)

    with pytest.raises(ContractError, match="StepResult at once; .*`async def`"):
        EpisodeRunner(Plain(), AMPLE_S).step_all([0], [turn()])


def test_resets_get_their_rows_and_seeds_and_are_checked():
    with_runner = EpisodeRunner(StepEnvironment(done), AMPLE_S)
    resets = with_runner.reset_all([{"prompt": "a"}, {"prompt": "b"}], np.asarray([7, 8]))
    assert [reset.observation.text for reset in resets] == ["a 7", "b 8"]
    assert [reset.state for reset in resets] == [{"prompt": "a"}, {"prompt": "b"}]
    with pytest.raises(RewardError, match=r"environment\.reset, episode 1 .*\(row \{'no': 1\}\).* KeyError: 'prompt'"):
        with_runner.reset_all([{"prompt": "a"}, {"no": 1}], [0, 0])
    with pytest.raises(ContractError, match="found 1 rows and 2 seeds"):
        with_runner.reset_all([{}], [0, 1])
    with pytest.raises(ContractError, match="found 2 states and 1 turns"):
        with_runner.step_all([0, 1], [turn()])
    with_runner.close()


def test_nothing_to_do_is_nothing_done():
    runner = EpisodeRunner(StepEnvironment(done), AMPLE_S)
    assert runner.step_all([], []) == []
    assert runner.reset_all([], []) == []


def test_calls_wait_for_each_other_at_most_in_turns(run):
    """None of them ends before as many have begun as run at a time."""
    begun = []
    all_there = asyncio.Event()

    async def slow(state):
        begun.append(state)
        if len(begun) == 256:  # as many as run at a time
            all_there.set()
        await all_there.wait()
        return done(float(state))

    outcomes = run(slow, number=500, timeout_s=60.0)
    assert rewards(outcomes) == [float(index) for index in range(500)]


def test_time_begins_when_a_call_does(run, monkeypatch):
    """By a clock that each of 40 calls moves by a second: none is at work while more than a few others are."""
    monkeypatch.setattr(environment_runner, "MAX_CONCURRENT", 2)
    now, work = [0.0], EpisodeRunner.work
    monkeypatch.setattr(EpisodeRunner, "work", lambda runner, begin: work(runner, begin, lambda: now[0]))

    async def slow(state):
        now[0] += 1.0
        await asyncio.sleep(0.1)
        return done(float(state))

    assert rewards(run(slow, number=40, timeout_s=10.0)) == [float(index) for index in range(40)]


def test_an_environment_may_bound_how_many_calls_are_at_work():
    at_work = []

    async def slow(state):
        at_work.append(state)
        most.append(len(at_work))
        await asyncio.sleep(0.2)
        at_work.remove(state)
        return done(float(state))

    most = []
    runner = EpisodeRunner(StepEnvironment(slow), 60.0, max_concurrent=2)
    assert rewards(runner.step_all(list(range(10)), [turn()] * 10)) == [float(index) for index in range(10)]
    assert max(most) == 2
    runner.close()


def test_calls_that_never_wait_do_not_hold_up_the_others(run, monkeypatch):
    monkeypatch.setattr(environment_runner, "MAX_CONCURRENT", 4)
    order = []

    async def step(state):
        if state == 0:
            await asyncio.sleep(0.01)
        else:
            time.sleep(0.002)
        order.append(state)
        return done(0.0)

    run(step, number=100, timeout_s=5.0)
    assert order.index(0) < 50


def test_calls_may_use_their_own_time_limits(run):
    async def step(state):
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(10)
        except TimeoutError:
            return done(float(state))

    assert rewards(run(step, timeout_s=5.0)) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_many_stuck_calls_end_even_a_masking_run(run, monkeypatch):
    monkeypatch.setattr(environment_runner, "MAX_STUCK", 2)
    with pytest.raises(RewardError, match="More than 2 calls got stuck"):
        run(blocking, timeout_s=0.1, on_error="mask")


def started(runner, begin):
    work = runner.work(begin)
    work.start()
    return work


def test_threads_that_look_at_once_give_a_stuck_event_loop_up_once():
    """The stream's thread looks beside the one that waits for the batch."""
    released, loops = threading.Event(), []
    runner = EpisodeRunner(StepEnvironment(lambda _: released.wait()), 0.1, "mask")

    async def begin(calls):
        loops.append(asyncio.get_running_loop())
        assert isinstance(await calls.make(runner.step(0, turn(), (0, 1))), Failure)
        await asyncio.sleep(0.3)

    driven = started(runner, begin)
    looking = threading.Barrier(2)

    def look():
        looking.wait()
        while not driven.poll(0.01):
            pass

    threads = [threading.Thread(target=look, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    released.set()
    assert not any(thread.is_alive() for thread in threads)
    assert (len(loops), driven.num_stuck) == (2, 1)
    runner.close()


def test_work_beside_the_stuck_one_goes_on_on_the_next_event_loop():
    released, loops = threading.Event(), []
    runner = EpisodeRunner(StepEnvironment(lambda _: released.wait()), 0.1, "mask")

    async def waits(calls):
        loops.append(asyncio.get_running_loop())
        if len(loops) == 1:
            await asyncio.Event().wait()

    waiting = started(runner, waits)
    assert [type(outcome) for outcome in runner.step_all([0], [turn()])] == [Failure]
    while not waiting.poll(0.01):
        pass
    released.set()
    assert (len(loops), waiting.num_stuck) == (2, 0)
    runner.close()


def test_the_call_that_blocks_is_at_fault_whoever_waits():
    """An evaluation waits beside the agents of a run that goes ahead."""
    released, outcomes, begun = threading.Event(), [], []
    others_wait = asyncio.Event()

    async def step(state):
        begun.append(state)
        if state == "blocks":
            released.wait()
        if begun.count("waits too") == 1:
            others_wait.set()
        if begun.count(state) == 1:
            await asyncio.Event().wait()
        return done(1.0)

    runner = EpisodeRunner(StepEnvironment(step), 0.3, "mask")

    async def begin(calls):
        await others_wait.wait()
        outcomes.append(await calls.make(runner.step("blocks", turn(), (0, 1))))

    beside = started(runner, begin)
    assert rewards(runner.step_all(["waits", "waits too"], [turn(), turn()])) == [1.0, 1.0]
    while not beside.poll(0.01):
        pass
    released.set()
    assert begun == ["waits", "waits too", "blocks", "waits", "waits too"]
    assert ([type(outcome) for outcome in outcomes], beside.num_stuck) == ([Failure], 1)
    runner.close()


@pytest.mark.parametrize("bad", [blocking, uncancellable], ids=["blocks", "uncancellable"])
def test_the_first_stuck_call_ends_a_run_that_masks_none(bad):
    runner = EpisodeRunner(StepEnvironment(bad), 0.1)

    async def begin(calls):
        await asyncio.gather(*(calls.make(runner.step(0, turn(), (number, 6))) for number in range(6)))

    driven = started(runner, begin)
    with pytest.raises(RewardError, match="on_environment_error"):
        while not driven.poll(0.01):
            pass
    assert driven.num_stuck > 0
    driven.cancel()
    runner.close()


def test_a_call_that_was_given_up_ends_no_run_however_long_it_goes_on():
    runner, begun = EpisodeRunner(StepEnvironment(uncancellable), 0.1), []

    async def begin(calls):
        begun.append(calls)
        if len(begun) == 1:
            making = asyncio.create_task(calls.make(runner.step(0, turn(), (0, 1))))
            await asyncio.sleep(0)
            calls.give_up([("step", 0)])
            await making

    driven = started(runner, begin)
    while not driven.poll(0.01):
        pass
    assert len(begun) == 2
    runner.close()


@pytest.mark.parametrize(("blocks_s", "poll_s"), [(0.6, 0.0), (0.6, 0.2), (600.0, 0.2), (600.0, 1.1)])
def test_a_blocking_call_is_late_however_seldom_somebody_looks(blocks_s, poll_s):
    """A generator looks between its own steps, which take long; what the call came to after its time does not count."""
    released, ended = threading.Event(), threading.Event()

    def step(_state):
        released.wait(blocks_s)
        ended.set()
        return done(1.0)

    runner, outcomes = EpisodeRunner(StepEnvironment(step), 0.3, "mask"), []

    async def begin(calls):
        outcomes.append(await calls.make(runner.step(0, turn(), (0, 1))))

    driven = started(runner, begin)
    while True:
        time.sleep(poll_s or 0.8)
        if driven.poll(0.0):
            break
    assert blocks_s < 1.0 or not ended.is_set(), "it was waited for"
    released.set()
    assert [type(outcome) for outcome in outcomes] == [Failure]
    assert "rollout.environment_timeout_s" in outcomes[0].reason
    runner.close()


def test_a_process_that_stood_still_finds_no_call_late(monkeypatch):
    """The time that passes between two looks while nothing runs counts for no call."""
    stood_still_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + stood_still_s[0])
    monkeypatch.setattr(environment_runner, "time", clock)
    ended = threading.Event()

    async def step(_state):
        while not ended.is_set():
            await asyncio.sleep(0.01)
        return done(1.0)

    runner, outcomes = EpisodeRunner(StepEnvironment(step), 5.0, "mask"), []

    async def begin(calls):
        outcomes.append(await calls.make(runner.step(0, turn(), (0, 1))))

    driven = started(runner, begin)
    for _ in range(3):
        driven.poll(0.0)
        stood_still_s[0] += 3600.0
        driven.poll(0.0)
        time.sleep(0.1)
    ended.set()
    while not driven.poll(0.01):
        pass
    assert (rewards(outcomes), driven.num_stuck) == ([1.0], 0)
    runner.close()


@pytest.mark.parametrize("on_error", ["error", "mask"])
def test_a_call_that_cancels_all_tasks_of_the_loop_ends_the_run(run, on_error):
    async def cancelling_all(_state):
        for task in asyncio.all_tasks():
            task.cancel()
        await asyncio.sleep(0)

    with pytest.raises(RewardError, match="environment cancelled tasks"):
        run(cancelling_all, on_error=on_error)


def test_a_callback_that_blocks_the_loop_ends_even_a_masking_run(run):
    async def step(state):
        if state == 0:
            asyncio.get_running_loop().call_later(0.02, blocking, state)
        await asyncio.sleep(0.01)
        return done(0.0)

    async def waiting(state):
        result = await step(state)
        await asyncio.sleep(0.05)
        return result

    with pytest.raises(RewardError, match=r"blocked|got stuck"):
        run(waiting, number=20, timeout_s=0.2, on_error="mask")


def test_after_a_failure_the_runner_goes_on():
    runner = EpisodeRunner(StepEnvironment(failing_at(blocking, 3)), TIMEOUT_S)
    with pytest.raises(RewardError):
        runner.step_all([0, 3], [turn(), turn()])
    assert rewards(runner.step_all([1, 2], [turn(), turn()])) == [1.0, 2.0]
    runner.close()


def loop_threads():
    return {thread for thread in threading.enumerate() if thread.name == "environment-loop"}


def test_threads_end(run):
    before = loop_threads()
    runner = EpisodeRunner(StepEnvironment(failing_at(blocking, 0)), TIMEOUT_S, "mask")
    runner.step_all([0, 1], [turn(), turn()])
    assert len(loop_threads() - before) >= 1
    runner.close()
    runner.close()
    deadline = time.monotonic() + 300
    while loop_threads() - before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert loop_threads() <= before


def test_ctrl_c_interrupts_at_once_and_cancels_what_runs():
    begun, cancelled = threading.Event(), threading.Event()

    async def step(_state):
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    def press():
        if begun.wait(300):
            signal.raise_signal(signal.SIGINT)

    runner = EpisodeRunner(StepEnvironment(step), 3600.0)
    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt):
        runner.step_all([0], [turn()])
    assert cancelled.wait(300)
    runner.close()


def test_cancelled_work_does_not_begin_again():
    """As where a thread that looks begins it anew on another event loop meanwhile."""
    runner, begun = EpisodeRunner(StepEnvironment(done), AMPLE_S), []

    async def begin(calls):
        begun.append(calls)

    work = runner.work(begin)
    work.cancel()
    with pytest.raises(CancelledError):
        work.poll(0.01)
    work.start()
    with pytest.raises(CancelledError):
        while not work.poll(0.01):
            pass
    assert begun == []
    runner.close()


@pytest.mark.own_process
def test_overhead_is_linear(count_calls):
    def calls(number):
        runner = EpisodeRunner(StepEnvironment(lambda _: done(1.0)), 60.0)
        counted = count_calls(lambda: runner.step_all(list(range(number)), [turn()] * number))
        runner.close()
        return counted

    assert calls(8192) < 1.5 * 8 * calls(1024)


def test_closing_closes_the_environment_that_can_be():
    environment = StepEnvironment(done)
    closed = []
    environment.close = lambda: closed.append(True)
    runner = EpisodeRunner(environment, AMPLE_S)
    runner.close()
    runner.close()
    assert closed == [True, True]


def block():
    time.sleep(60.0)


def catch():
    while True:
        with contextlib.suppress(Exception):
            time.sleep(60.0)


@pytest.mark.parametrize("close", [block, catch])
def test_closing_an_environment_ends_at_its_limit(close, monkeypatch):
    monkeypatch.setenv(LOAD_VARIABLE, "1")
    environment = StepEnvironment(done)
    environment.close = close
    runner = EpisodeRunner(environment, AMPLE_S, owner="environment 'x'")
    with pytest.raises(PluginError, match=f"environment 'x' .* 1 s .*{LOAD_VARIABLE}"):
        runner.close()


class RowChanger:
    """Appends to what it was given, as a chat environment may to the messages of its prompt."""

    async def reset(self, row, seed):
        row["messages"].append({"role": "user", "content": "more"})
        row["messages"][0]["content"] += "!"
        row["seen"] = True
        return ResetResult(observation=Observation(messages=list(row["messages"])), state=None)

    async def run(self, row, seed, session):
        return EpisodeResult(reward=float(len((await self.reset(row, seed)).observation.messages)))

    async def step(self, state, turn):
        raise AssertionError

    def rows(self, split):
        return None


def test_a_row_is_what_it_was_whatever_an_environment_does_to_it():
    row = {"messages": [{"role": "user", "content": "a"}], "answer": 1}
    runner = EpisodeRunner(RowChanger(), AMPLE_S, "error")
    try:
        first, second = (runner.reset_all([row], [0])[0] for _ in range(2))
    finally:
        runner.close()
    for begun in (first, second):
        assert [message["content"] for message in begun.observation.messages] == ["a!", "more"]
    assert row == {"messages": [{"role": "user", "content": "a"}], "answer": 1}


def test_a_row_of_an_agent_is_what_it_was_too():
    row = {"messages": [{"role": "user", "content": "a"}]}
    runner = EpisodeRunner(RowChanger(), AMPLE_S, "error")
    try:
        call = runner.run(row, 0, lambda: None, (0, 1), "episode")
        assert asyncio.run(call.start()).reward == 2.0
    finally:
        runner.close()
    assert row == {"messages": [{"role": "user", "content": "a"}]}


def test_an_error_of_the_watch_ends_the_work_with_it(run, monkeypatch):
    async def watch(calls):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(environment_calls.EnvironmentCalls, "watch", watch)

    async def step(state):
        await asyncio.sleep(60)

    with pytest.raises(ZeroDivisionError, match="planted"):
        run(step, timeout_s=60.0)
