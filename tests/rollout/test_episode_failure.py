"""What an environment may raise: which errors end a run that masks, and that each is said in its own words."""

import asyncio
import threading
import time

import numpy as np
import pytest
from attrs import define

from rlcore.spi import (
    ConfigError,
    ContractError,
    DataError,
    FinishReason,
    ModelError,
    PluginError,
    Problem,
    RewardError,
    StepResult,
    StorageError,
    Turn,
    WorkerError,
)
from rlcore_rollout import environment_calls, event_loop
from rlcore_rollout.environment_runner import EpisodeRunner, Failure


@pytest.fixture
def run(monkeypatch):
    """Runs a step in six episodes, whose states are 0 to 5 by default."""
    monkeypatch.setattr(environment_calls, "GRACE_S", 0.3)
    runners = []

    def step_all(step, on_error="mask", states=range(6), timeout_s=1.0):
        runners.append(EpisodeRunner(Stepping(step), timeout_s, on_error, owner="environment 'acme'"))
        answer = Turn(text="answer", tokens=np.zeros(1, np.int32), finish_reason=FinishReason.STOP)
        return runners[-1].step_all(list(states), [answer] * len(states))

    yield step_all
    for runner in runners:
        runner.close()


@define
class Stepping:
    scores: object

    async def step(self, state, turn):
        result = self.scores(state)
        return StepResult(reward=float(await result if asyncio.iscoroutine(result) else result), done=True)


def at(number, bad):
    return lambda state: bad() if state == number else 1.0


def raises(error):
    def bad():
        raise error

    return bad


class Panic(BaseException):
    """As libraries in Rust raise."""


# Ctrl-C


async def in_a_task():
    await asyncio.create_task(waits_and_raises())


async def waits_and_raises():
    await asyncio.sleep(0.01)
    raise KeyboardInterrupt


async def in_a_task_that_no_one_waits_for():
    in_a_task_that_no_one_waits_for.task = asyncio.create_task(waits_and_raises())
    await asyncio.sleep(60)


async def in_a_thread():
    await asyncio.to_thread(raises(KeyboardInterrupt))


async def in_a_group():
    async with asyncio.TaskGroup() as group:
        group.create_task(waits_and_raises())
        group.create_task(asyncio.sleep(60))


async def once_its_time_is_over():
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


INTERRUPTS = [
    raises(KeyboardInterrupt),
    in_a_task,
    in_a_task_that_no_one_waits_for,
    in_a_thread,
    in_a_group,
    once_its_time_is_over,
]


@pytest.mark.parametrize("on_error", ["error", "mask"])
@pytest.mark.parametrize("bad", INTERRUPTS)
def test_an_interrupt_of_the_environments_own_is_one(run, bad, on_error):
    with pytest.raises(KeyboardInterrupt):
        run(at(3, bad), on_error)


def test_the_runner_goes_on_after_an_interrupt():
    before = set(threading.enumerate())
    runner = EpisodeRunner(Stepping(lambda state: in_a_task() if state else 1.0), 60.0)
    answer = Turn(text="", tokens=np.zeros(1, np.int32), finish_reason=FinishReason.STOP)
    with pytest.raises(KeyboardInterrupt):
        runner.step_all([1], [answer])
    assert [outcome.reward for outcome in runner.step_all([0, 0], [answer] * 2)] == [1.0, 1.0]
    runner.close()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "environment-loop"]


# What is no Exception


async def exits_in_a_task():
    async def leave():
        raise SystemExit(3)

    await asyncio.create_task(leave())


async def panics_in_a_thread():
    await asyncio.to_thread(raises(Panic("index out of bounds")))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (raises(Panic("index out of bounds")), "raised Panic: index out of bounds"),
        (panics_in_a_thread, "raised Panic: index out of bounds"),
        (raises(GeneratorExit()), "raised GeneratorExit: "),
        (exits_in_a_task, "raised SystemExit: 3"),
    ],
)
def test_what_is_no_exception_is_a_failure_of_its_episode(run, bad, reason):
    outcomes = run(at(3, bad))
    assert [index for index, outcome in enumerate(outcomes) if isinstance(outcome, Failure)] == [3]
    assert outcomes[3].reason == reason
    with pytest.raises(RewardError, match=rf"environment 'acme'\.step, episode 3 of 6 .*, {reason}\. Correct") as raised:
        run(at(3, bad), "error")
    assert raised.value.__cause__ is not None


# What ends the run


async def beside_a_masked_one():
    raise ExceptionGroup("checks", [KeyError("no"), ExceptionGroup("inner", [WorkerError("the judge died")])])


@pytest.mark.parametrize("on_error", ["error", "mask"])
@pytest.mark.parametrize(
    ("bad", "kind", "reason"),
    [
        (raises(DataError("found the reference answer 'x'; expected a number")), DataError, r"found the reference answer 'x'"),
        (raises(PluginError("the process that checks answers does not start")), PluginError, "the process that checks answers"),
        (raises(WorkerError("the judge died")), WorkerError, "the judge died"),
        (raises(ContractError("broken")), ContractError, "broken"),
        (raises(StorageError("no space for the judge's cache")), StorageError, "no space for the judge's cache"),
        (beside_a_masked_one, WorkerError, r"the judge died \(one of 2 in ExceptionGroup: checks \(2 sub-exceptions\)\)"),
    ],
)
def test_what_is_no_fault_of_the_episode_ends_even_a_masking_run(run, bad, kind, reason, on_error):
    with pytest.raises(kind, match=rf"^environment 'acme'\.step, episode 3 of 6 \(.*\), {reason}"):
        run(at(3, bad), on_error)


PROBLEM = Problem(path="environment.acme.judge", found="no address", expected="one")


@pytest.mark.parametrize("on_error", ["error", "mask"])
@pytest.mark.parametrize("kind", [ConfigError, ModelError])
def test_nor_is_passed_over_what_is_wrong_with_the_recipe(run, kind, on_error):
    with pytest.raises(kind) as raised:
        run(at(3, raises(kind([PROBLEM]))), on_error)
    assert raised.value.problems == (PROBLEM,)
    (note,) = raised.value.__notes__
    assert note.startswith("raised in environment 'acme'.step, episode 3 of 6 (")


def test_it_ends_at_once(run):
    """The other calls, which would never end, are cancelled."""
    with pytest.raises(DataError):
        run(lambda state: raises(DataError("wrong"))() if state == 3 else asyncio.Event().wait(), timeout_s=3600.0)


class OddError(DataError):
    """Made of two things, as errors of plugins may be."""

    def __init__(self, row, fault):
        super().__init__(f"row {row}: {fault}")


def test_a_kind_of_its_own_with_another_constructor(run):
    with pytest.raises(DataError, match="episode 3 of 6 .*row 7: empty"):
        run(at(3, raises(OddError(7, "empty"))))


# The words


async def groups():
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.to_thread(raises(KeyError("no score"))))
        group.create_task(asyncio.sleep(60))


def test_the_first_cause_of_a_group_is_said(run):
    assert run(at(3, groups))[3].reason == (
        "raised KeyError: 'no score' (one of 1 in ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception))"
    )


class NoText(Exception):
    def __str__(self):
        raise TypeError


def test_an_error_whose_text_raises(run):
    assert run(at(3, raises(NoText())))[3].reason == "raised NoText: <its text raises TypeError>"


class NoRepr:
    def __init__(self, error):
        self.error = error

    def __repr__(self):
        raise self.error


@pytest.mark.parametrize(("error", "words"), [(RuntimeError("gone"), "gone"), (Panic(), "NoRepr whose repr raises Panic")])
def test_a_state_that_cannot_be_shown_leaves_the_error_as_it_is(run, error, words):
    with pytest.raises(RewardError, match=rf"state <.*{words}.*>\).* KeyError: 'no score'") as raised:
        run(lambda _: raises(KeyError("no score"))(), "error", [NoRepr(error)])
    assert isinstance(raised.value.__cause__, KeyError)


@define
class History:
    turns: list
    text: str


class Counted:
    """Counts how often it is shown."""

    shown = 0

    def __repr__(self):
        Counted.shown += 1
        return "one"


def test_of_a_large_state_little_is_made(run):
    Counted.shown = 0
    state = History(turns=[Counted()] * 100_000, text="long" * 1_000_000)
    with pytest.raises(RewardError, match=r"state History\(turns=\[one, one, .*, raised KeyError"):
        run(lambda _: raises(KeyError("no score"))(), "error", [state])
    assert 0 < Counted.shown < 100
    masked = Counted.shown
    run(lambda _: raises(KeyError("no score"))(), "mask", [state])
    assert Counted.shown == masked, "a failure that is masked needs no description of its state"


# An event loop that is given up


def test_calls_that_had_not_ended_begin_again_and_those_that_had_do_not(run, monkeypatch):
    monkeypatch.setattr(event_loop, "POLITE_S", 0.05)
    begun, ended = [], []

    async def step(state):
        begun.append(state)
        if state == 0:
            return 1.0
        await asyncio.sleep(0.1)
        while state == 1:
            time.sleep(0.001)
        await asyncio.sleep(0.1)
        ended.append(state)
        return 1.0

    outcomes = run(step, states=range(3), timeout_s=3.0)
    assert [isinstance(outcome, Failure) for outcome in outcomes] == [False, True, False]
    assert (begun, ended) == ([0, 1, 2, 2], [2])
