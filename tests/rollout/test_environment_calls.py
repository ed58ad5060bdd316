"""Calls on one event loop: each within its time; what fails is an outcome, and what comes too late is none."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.spi import ContractError
from rlcore_rollout import environment_calls
from rlcore_rollout.environment_calls import Call, EnvironmentCalls
from rlcore_rollout.environment_results import Failure


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_calls, "GRACE_S", 0.1)
    monkeypatch.setattr(environment_calls, "POLL_S", 0.01)


def calls(timeout_s: float = 60.0, **options: Any) -> EnvironmentCalls:
    return EnvironmentCalls(timeout_s=timeout_s, **options)


def call(start: Callable[[], Any], key: Any = 0) -> Call[Any]:
    return Call(key=key, function="step", start=start, check=lambda result: result, describe=lambda: f"episode {key}")


def test_a_call_comes_to_what_it_returns_or_to_a_failure() -> None:
    async def good() -> str:
        await asyncio.sleep(0)
        return "answer"

    async def bad() -> str:
        raise LookupError("no answer")

    async def main() -> list[Any]:
        made = calls()
        return [await made.make(call(start)) for start in (good, bad, lambda: "at once")]

    answer, failure, plain = asyncio.run(main())
    assert answer == "answer"
    assert isinstance(failure, Failure)
    assert isinstance(failure.error, LookupError)
    assert isinstance(plain, Failure)
    assert isinstance(plain.error, ContractError)


def test_a_call_is_given_up_and_others_go_on() -> None:
    made = calls()

    async def answers() -> str:
        await asyncio.sleep(0.05)
        return "answer"

    async def main() -> list[Any]:
        under_way = [
            asyncio.create_task(made.make(call(start, key))) for key, start in enumerate((asyncio.Event().wait, answers))
        ]
        await asyncio.sleep(0)
        made.give_up([0, 7])
        return await asyncio.gather(*under_way)

    given_up, answer = asyncio.run(main())
    assert isinstance(given_up, Failure)
    assert answer == "answer"


def test_no_time_passes_while_the_clock_of_calls_stands_still() -> None:
    now = [0.0]

    async def waits(made: EnvironmentCalls) -> Any:
        watch = asyncio.create_task(made.watch())
        waiting = asyncio.create_task(made.make(call(asyncio.Event().wait)))
        while made.heartbeats < 5:  # it has been looked at some times
            await asyncio.sleep(0.001)
        was_done, now[0] = waiting.done(), 1.0
        outcome = await waiting
        watch.cancel()
        return was_done, outcome

    was_done, outcome = asyncio.run(waits(calls(timeout_s=0.04, now=lambda: now[0])))
    assert not was_done
    assert isinstance(outcome, Failure)
    assert "environment_timeout_s" in outcome.reason


def test_calls_that_never_wait_give_way_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a task that has waited, after each stretch of time that they took."""
    now = [0.0]
    monkeypatch.setattr(environment_calls, "time", SimpleNamespace(monotonic=lambda: now[0]))
    order: list[str] = []

    async def work() -> None:
        order.append("call")
        now[0] += 0.6 * environment_calls.TURN_S

    async def beside() -> None:
        while True:
            order.append("other")
            await asyncio.sleep(0)

    async def main() -> None:
        made, other = calls(), asyncio.create_task(beside())
        for number in range(6):
            await made.make(call(work, number))
            await made.give_way()
        other.cancel()

    asyncio.run(main())
    assert order == ["call", "other", "call", "call", "other", "call", "call", "other", "call"]


def test_a_call_over_its_time_is_cancelled_and_its_task_goes_on() -> None:
    async def main() -> tuple[Any, Any, int]:
        made = calls(timeout_s=0.05)
        watch = asyncio.create_task(made.watch())
        task = asyncio.current_task()
        assert task is not None
        late = await made.make(call(lambda: asyncio.sleep(60, "never")))
        after = await made.make(call(lambda: asyncio.sleep(0, "after")))
        watch.cancel()
        return late, after, task.cancelling()

    late, after, cancelling = asyncio.run(main())
    assert isinstance(late, Failure)
    assert "0.05 s (rollout.environment_timeout_s)" in late.reason
    assert (after, cancelling) == ("after", 0)


def test_a_cancelled_caller_stays_cancelled() -> None:
    async def main() -> bool:
        made = calls()
        task = asyncio.create_task(made.make(call(lambda: asyncio.sleep(60))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(main())


def test_a_call_that_goes_on_after_being_cancelled_is_named() -> None:
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    async def main() -> list[Any]:
        made = calls(timeout_s=0.05)
        watch = asyncio.create_task(made.watch())
        task = asyncio.create_task(made.make(call(stubborn, "stubborn")))
        while not made.uncancellable:
            await asyncio.sleep(0.01)
        release.set()
        await asyncio.wait([task])
        watch.cancel()
        return [one.key for one in made.uncancellable]

    assert set(asyncio.run(main())) == {"stubborn"}


def test_a_call_that_got_stuck_on_an_earlier_event_loop_is_not_made_again() -> None:
    stuck = Failure(reason="it blocks")
    begun: list[str] = []

    async def main() -> list[Any]:
        made = calls(given_up={"a": stuck})
        return [await made.make(call(lambda key=key: asyncio.sleep(0, begun.append(key)), key)) for key in ("a", "b")]

    assert asyncio.run(main()) == [stuck, None]
    assert begun == ["b"]


def test_what_ends_after_its_event_loop_was_given_up_is_no_outcome() -> None:
    async def main() -> tuple[bool, bool]:
        made = calls()
        begun = asyncio.Event()
        release = asyncio.Event()

        async def late() -> str:
            begun.set()
            await release.wait()
            return "too late"

        ending = asyncio.create_task(made.make(call(late)))
        await begun.wait()
        made.is_over = True
        beginning = asyncio.create_task(made.make(call(late)))
        release.set()
        await asyncio.wait([ending, beginning])
        return ending.cancelled(), beginning.cancelled()

    assert asyncio.run(main()) == (True, True)


def test_the_call_that_holds_the_loop_is_told_from_those_that_wait() -> None:
    async def main() -> tuple[list[Any], list[Any]]:
        made = calls()
        loop = asyncio.get_running_loop()
        found: list[Any] = []

        async def looking() -> None:
            found.extend(one.key for one in made.executing(loop))

        waiting = asyncio.create_task(made.make(call(lambda: asyncio.sleep(60), "waits")))
        await asyncio.sleep(0)
        await made.make(call(looking, "looks"))
        none_of_them = [one.key for one in made.executing(loop)]
        waiting.cancel()
        return found, none_of_them

    assert asyncio.run(main()) == (["looks"], ["waits"])
