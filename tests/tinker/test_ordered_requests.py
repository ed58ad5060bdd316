"""The order of a model's requests, futures, and locks, without a model."""

import asyncio
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest

from rlcore_tinker.errors import RequestError
from rlcore_tinker.ordered_requests import MAX_WAITING, OrderedRequests
from rlcore_tinker.promises import Promises, Result
from rlcore_tinker.weights import SharedLock


async def _run(order: tuple[int, ...], failing: tuple[int, ...] = ()) -> tuple[list[int], list[Any]]:
    """The numbers in the order in which they ran, and the results."""
    promises, ran = Promises(), list[int]()
    requests = OrderedRequests("m", promises, lambda error: None)

    def work(number: int) -> Callable[[], Any]:
        async def run() -> Result:
            ran.append(number)
            await asyncio.sleep(0)
            if number in failing:
                raise RequestError(f"no {number}")
            return Result.json(number)

        return run

    made = [requests.submit(number, work(number)) for number in order for _ in range(2)]  # each comes twice
    results = [await promise.wait(5) for promise in made]
    await requests.close("over")
    return ran, results


@pytest.mark.parametrize("order", [*permutations((1, 2, 3))])
def test_requests_run_once_and_in_their_order_however_they_come(order: tuple[int, ...]) -> None:
    ran, results = asyncio.run(_run(order))
    assert ran == [1, 2, 3]
    assert [result.content for result in results] == [str(number).encode() for number in order for _ in range(2)]


def test_a_request_that_fails_lets_the_next_one_run() -> None:
    ran, results = asyncio.run(_run((1, 2), failing=(1,)))
    assert ran == [1, 2]
    assert b"no 1" in results[0].content
    assert results[2].content == b"2"


def test_requests_that_wait_fail_when_the_model_is_released() -> None:
    async def released() -> Any:
        promises = Promises()
        requests = OrderedRequests("m", promises, lambda error: None)
        waiting = requests.submit(2, lambda: pytest.fail("nothing ran before it"))
        await requests.close("the model was released")
        return await waiting.wait(1)

    assert b"released" in asyncio.run(released()).content


@pytest.mark.parametrize(("seq_id", "status"), [(0, 400), (MAX_WAITING + 1, 429)])
def test_numbers_out_of_range_are_refused(seq_id: int, status: int) -> None:
    async def refused() -> int:
        requests = OrderedRequests("m", Promises(), lambda error: None)
        with pytest.raises(RequestError) as error:
            requests.submit(seq_id, lambda: pytest.fail("it is refused"))
        await requests.close("over")
        return error.value.status

    assert asyncio.run(refused()) == status


def test_a_cancelled_future_keeps_its_error() -> None:
    async def ended() -> Any:
        promises = Promises()
        promise, _ = promises.make("r", ("s", 0))
        await promises.end(promise, RequestError("cancelled"))
        await promises.end(promise, Result.json(1))
        completions, cursor = await promises.ended_after(("s", 0), 0, 1.0)
        return promise.result, completions, cursor

    result, completions, cursor = asyncio.run(ended())
    assert b"cancelled" in result.content
    assert (completions, cursor) == ([{"state": "failed", "request_id": "r"}], 1)


def test_results_of_samples_are_dropped_with_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client asks for each future by default, and returns no cursor of those that it has seen."""

    async def kept() -> tuple[int, int]:
        seconds = 0.0
        monkeypatch.setattr("rlcore_tinker.promises.time.monotonic", lambda: seconds)
        promises = Promises(keep_s=60.0)
        for number in range(9):
            promise, _ = promises.make(str(number), ("s", 0))
            await promises.end(promise, Result.json(number))
            seconds += 30.0
        completions, cursor = await promises.ended_after(("s", 0), 0, 1.0)
        return len(completions), cursor

    found, cursor = asyncio.run(kept())
    assert found <= 4
    assert cursor == 9


def test_who_holds_a_shared_lock_alone_waits_for_all_and_lets_none_in() -> None:
    async def held() -> list[str]:
        lock, seen = SharedLock(), list[str]()

        async def share(name: str, turns: int) -> None:
            async with lock.shared():
                seen.append(f"{name} in")
                for _ in range(turns):
                    await asyncio.sleep(0)
                seen.append(f"{name} out")

        async def alone() -> None:
            async with lock.alone():
                seen.append("alone")

        await asyncio.gather(share("a", 3), share("b", 5), alone(), share("late", 1))
        return seen

    assert asyncio.run(held()) == ["a in", "b in", "a out", "b out", "alone", "late in", "late out"]
