"""Runs coroutines on an event loop in the order in which they are added, a bounded number at a time."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from operator import itemgetter
from typing import Any, TypeAlias

from rlcore.run.rollout.environment_calls import EnvironmentCalls
from rlcore.run.rollout.environment_runner import all_or_first

Work: TypeAlias = Callable[[Any], Coroutine[Any, Any, None]]


class TaskPool:
    """A bounded pool of asyncio tasks, each of which runs one added coroutine after another.

    A task for each coroutine would cost more than most calls of an environment do."""

    def __init__(self) -> None:
        self._todo: deque[tuple[Work, Any, int]] = deque()
        self._errors: list[tuple[int, BaseException]] = []
        """Errors that work raised, each with its `order`."""
        self._idle: deque[asyncio.Future[None]] = deque()
        self._at_work: set[asyncio.Task[Any]] = set()
        self._living: set[asyncio.Task[Any]] = set()
        """Tasks of the pool that have not ended. Work may end its own task by cancelling it."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_called = False
        """True while a call of `_share` is scheduled."""
        self._is_closed = False
        self._is_held = False
        self._error: BaseException | None = None

    def begin(self) -> None:
        """Reset the pool for another event loop. Work that has not begun is dropped."""
        self._todo.clear()
        self._idle.clear()
        self._at_work.clear()
        self._errors.clear()
        self._loop, self._is_called, self._living = None, False, set()
        self._is_closed, self._error = False, None

    def add(self, work: Work, item: Any = None, order: int = 0) -> None:
        """Queue `work(item)`. Of errors that several pieces raise at once, `run` raises that of the lowest order."""
        self._todo.append((work, item, order))
        if not self._is_called:
            self._call()

    def close(self) -> None:
        """End the pool: drop queued work and cancel work that has begun."""
        self._is_closed = True
        self._wake(len(self._idle))
        self._cancel_work()

    def fail(self, error: BaseException) -> None:
        """Let `run` raise an error, and cancel work that has begun."""
        self._error = self._error or error
        self._wake(len(self._idle))
        self._cancel_work()

    def hold(self) -> None:
        """Begin no work until `release`. Work that has begun goes on."""
        self._is_held = True

    def release(self) -> None:
        """Begin queued work again."""
        self._is_held = False
        self._wake(len(self._idle))

    @property
    def is_at_work(self) -> bool:
        """Return whether work has begun and not ended."""
        return bool(self._at_work)

    async def run(self, calls: EnvironmentCalls, num_tasks: int) -> None:
        """Run work until `close`. The first error of a piece of work ends the others and is raised."""
        raised: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        try:
            await all_or_first([self._run_task(calls) for _ in range(num_tasks)])
        except BaseException as error:
            raised = error
        finally:
            if self._loop is asyncio.get_running_loop():  # else another one has begun
                self._loop = None
        if self._errors and raised is not None:
            raised = min(self._errors, key=itemgetter(0))[1]
        raised = raised or self._error
        if raised is not None:
            raise raised

    async def _run_task(self, calls: EnvironmentCalls) -> None:
        task = asyncio.current_task()
        assert task is not None
        living = self._living
        living.add(task)
        try:
            await self._work(task, calls)
        finally:
            living.discard(task)

    async def _work(self, task: "asyncio.Task[Any]", calls: EnvironmentCalls) -> None:
        todo, state = self._todo, calls.state
        while not (self._is_closed or state.over):  # the rest is for tasks of another event loop
            if self._error is not None:
                raise self._error
            if not todo or self._is_held:
                self._idle.append(asyncio.get_running_loop().create_future())
                await self._idle[-1]
                continue
            work, item, order = todo.popleft()
            if todo and not self._is_called:
                self._call()  # this work may wait, and the rest must not
            self._at_work.add(task)
            try:
                await work(item)
            except Exception as error:
                self._errors.append((order, error))
                self._wake(len(todo))  # what came with it may raise too
                raise
            finally:
                self._at_work.discard(task)
            if time.monotonic() > state.give_way_at:
                await calls.give_way()

    def _call(self) -> None:
        """Schedule `_share`. Work that never waits leaves nothing to share by then, and one task does it all."""
        if self._loop is not None and self._idle:
            self._is_called = True
            self._loop.call_soon(self._share, self._loop)

    def _share(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake idle tasks for queued work, unless a task is about to take it."""
        if loop is not self._loop:  # one that was given up
            return
        self._is_called = False
        if not self._todo or len(self._living) > len(self._idle) + len(self._at_work):
            return
        # Where work waits the rest will too, and is begun at once.
        self._wake(len(self._todo) if self._at_work else 1)

    def _cancel_work(self) -> None:
        if self._at_work:
            for task in self._at_work - {asyncio.current_task()}:
                task.cancel()

    def _wake(self, num_tasks: int) -> None:
        while num_tasks and self._idle:
            future = self._idle.popleft()
            if not future.done():
                future.set_result(None)
                num_tasks -= 1
