"""The task pool runs work in order, a bounded number of pieces at a time."""

import asyncio
from contextlib import nullcontext, suppress

import pytest

from rlcore_rollout.environment_calls import EnvironmentCalls, TaskPool


def run(task_pool: TaskPool, num_tasks: int) -> None:
    asyncio.run(task_pool.run(EnvironmentCalls(timeout_s=60.0), num_tasks))


def test_work_is_done_in_the_order_of_coming_and_so_many_at_once() -> None:
    task_pool, begun, together = TaskPool(), [], []
    at_work = 0

    async def work(item: int) -> None:
        nonlocal at_work
        begun.append(item)
        at_work += 1
        together.append(at_work)
        await asyncio.sleep(0.001)
        at_work -= 1
        if item == 9:
            task_pool.close()

    for item in range(10):
        task_pool.add(work, item)
    run(task_pool, 3)
    assert begun == list(range(10))
    assert max(together) == 3


def test_tasks_of_an_event_loop_that_was_given_up_leave_the_work_to_those_of_the_next() -> None:
    task_pool, done = TaskPool(), list[str]()

    async def work(item: str) -> None:
        done.append(item)
        if item == "next":
            task_pool.close()

    async def both() -> None:
        given_up = EnvironmentCalls(timeout_s=60.0)
        last = asyncio.create_task(task_pool.run(given_up, 2))
        await asyncio.sleep(0.01)
        task_pool.add(work, "late")
        given_up.is_over = True
        await asyncio.sleep(0.01)
        task_pool.begin()
        task_pool.add(work, "next")
        await asyncio.wait_for(task_pool.run(EnvironmentCalls(timeout_s=60.0), 2), 300)
        last.cancel()

    asyncio.run(both())
    assert done == ["next"]


def test_work_that_comes_later_wakes_a_task() -> None:
    task_pool, done = TaskPool(), []

    async def last(item: str) -> None:
        done.append(item)
        task_pool.close()

    async def first(item: str) -> None:
        await asyncio.sleep(0)  # the other task is idle by then
        done.append(item)
        task_pool.add(last, "last")

    task_pool.add(first, "first")
    run(task_pool, 2)
    assert done == ["first", "last"]


@pytest.mark.parametrize("raised_by_work", [True, False])
def test_an_error_ends_the_tasks(raised_by_work: bool) -> None:
    task_pool = TaskPool()

    async def work(_: None) -> None:
        if raised_by_work:
            raise ValueError("no")
        task_pool.fail(ValueError("no"))

    task_pool.add(work)
    with pytest.raises(ValueError, match="no"):
        run(task_pool, 2)


def test_an_error_from_outside_ends_work_that_waits() -> None:
    task_pool = TaskPool()

    async def waits(_: None) -> None:
        asyncio.get_running_loop().call_soon(task_pool.fail, ValueError("no"))
        await asyncio.Event().wait()

    task_pool.add(waits)
    with pytest.raises(ValueError, match="no"):
        run(task_pool, 1)


def test_held_tasks_end_their_work_and_begin_none() -> None:
    task_pool, done = TaskPool(), []

    async def work(item: int) -> None:
        task_pool.hold()
        await asyncio.sleep(0)
        done.append(item)
        if item == 1:
            task_pool.close()
        else:
            asyncio.get_running_loop().call_later(0.01, go_on)

    def go_on() -> None:
        assert (done, task_pool.is_at_work) == ([0], False)
        task_pool.release()

    for item in range(2):
        task_pool.add(work, item)
    run(task_pool, 1)
    assert done == [0, 1]


def test_of_errors_at_once_that_of_the_lowest_order_is_raised() -> None:
    task_pool = TaskPool()

    async def work(order: int) -> None:
        await asyncio.sleep(0)
        raise ValueError(f"piece {order}")

    for order in (3, 1, 2):
        task_pool.add(work, order, order)
    with pytest.raises(ValueError, match="piece 1"):
        run(task_pool, 3)


@pytest.mark.parametrize("num_tasks", [2, 3])
def test_work_that_waits_keeps_none_of_the_rest_waiting(num_tasks: int) -> None:
    task_pool, begun = TaskPool(), []

    async def work(item: int) -> None:
        begun.append(item)
        if item == 1:
            others.set()
        await others.wait()
        if len(begun) == num_tasks:
            task_pool.close()

    def begin() -> None:
        for item in range(num_tasks):
            task_pool.add(work, item)

    async def later() -> None:
        asyncio.get_running_loop().call_later(0.01, begin)
        await task_pool.run(EnvironmentCalls(timeout_s=60.0), num_tasks)

    others = asyncio.Event()
    asyncio.run(asyncio.wait_for(later(), 30))  # a planted fault waits as long
    assert begun == list(range(num_tasks))


def test_work_that_is_added_while_all_others_wait_is_begun() -> None:
    task_pool, last = TaskPool(), asyncio.Event()

    async def waits(_: None) -> None:
        asyncio.get_running_loop().call_later(0.01, task_pool.add, ends)
        await last.wait()
        task_pool.close()

    async def ends(_: None) -> None:
        last.set()

    task_pool.add(waits)
    asyncio.run(asyncio.wait_for(task_pool.run(EnvironmentCalls(timeout_s=60.0), 2), 300))
    assert last.is_set()


def test_a_task_that_its_work_ends_keeps_no_other_from_what_comes() -> None:
    task_pool, done = TaskPool(), []

    async def ends_its_task(_: int) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        asyncio.get_running_loop().call_later(0.01, come)
        await asyncio.sleep(0)

    async def work(item: int) -> None:
        done.append(item)
        if item == 4:
            task_pool.close()

    def come() -> None:
        for item in range(5):
            task_pool.add(work, item)

    task_pool.add(ends_its_task)
    asyncio.run(asyncio.wait_for(task_pool.run(EnvironmentCalls(timeout_s=60.0), 4), 300))
    assert done == [0, 1, 2, 3, 4]


def test_of_errors_that_come_together_the_first_in_order_is_raised() -> None:
    task_pool = TaskPool()

    async def fails(item: int) -> None:
        raise ValueError(item)

    async def come(_: int) -> None:
        for order in (5, 3, 1):
            task_pool.add(fails, order, order)

    task_pool.add(come)
    with pytest.raises(ValueError, match=r"^1$"):
        run(task_pool, 4)


def test_work_that_comes_once_its_event_loop_has_closed_waits_for_the_next() -> None:
    task_pool = TaskPool()

    async def fails(_: int) -> None:
        await asyncio.sleep(0)
        raise ValueError

    task_pool.add(fails)
    with pytest.raises(ValueError):
        run(task_pool, 2)
    task_pool.add(fails)


@pytest.mark.parametrize("end", ["close", "fail", "raise"])
def test_work_that_catches_its_cancellation_begins_no_other(end: str) -> None:
    task_pool, begun = TaskPool(), []

    async def work(item: int) -> None:
        begun.append(item)
        if item == 3:
            if end == "raise":
                raise ValueError("it failed")
            task_pool.close() if end == "close" else task_pool.fail(ValueError("it failed"))
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(300)

    for item in range(12):
        task_pool.add(work, item)
    with nullcontext() if end == "close" else pytest.raises(ValueError, match="it failed"):
        run(task_pool, 4)
    assert begun == [0, 1, 2, 3]


def test_a_task_that_begins_once_its_event_loop_is_given_up_takes_nothing_from_the_next() -> None:
    task_pool, done = TaskPool(), list[str]()

    async def work(item: str) -> None:
        done.append(item)
        task_pool.close()

    async def both() -> None:
        given_up = EnvironmentCalls(timeout_s=60.0)
        last = asyncio.create_task(task_pool.run(given_up, 2))
        task_pool.add(lambda _: asyncio.sleep(0), "dropped")
        asyncio.get_running_loop().call_soon(task_pool.begin)  # behind `run`, and before its tasks
        asyncio.get_running_loop().call_soon(task_pool.add, work, "next")
        given_up.is_over = True
        await asyncio.sleep(0.01)
        await asyncio.wait_for(task_pool.run(EnvironmentCalls(timeout_s=60.0), 2), 300)
        last.cancel()

    asyncio.run(both())
    assert done == ["next"]
