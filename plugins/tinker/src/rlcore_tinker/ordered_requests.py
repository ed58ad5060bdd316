"""Runs the requests of one model one after another, in the order of their numbers, however they come in."""

import asyncio
from collections.abc import Awaitable, Callable

from rlcore_tinker.errors import RequestError, as_request_error
from rlcore_tinker.promises import Promise, Promises, Result

MAX_WAITING = 4096
"""Most requests of a model that wait."""
FIRST = 1
"""The number of a model's first request behind the one that created it."""
Work = Callable[[], Awaitable[Result]]


class OrderedRequests:
    """The requests of one model. Number n runs once all before it have ended."""

    def __init__(self, model_id: str, promises: Promises, on_error: Callable[[BaseException], object]) -> None:
        """`on_error` is called with each error that a request ended with."""
        self._model_id, self._promises, self._on_error = model_id, promises, on_error
        self._waiting: dict[int, tuple[Promise, Work]] = {}
        self._next = FIRST
        self._came = asyncio.Event()
        self._runner = asyncio.create_task(self._run())

    def submit(self, seq_id: int, work: Work) -> Promise:
        """Return the future of a request. One that comes twice runs once."""
        if seq_id < FIRST:
            raise RequestError(f"seq_id: found {seq_id}; expected {FIRST} or more, counting this model's requests")
        if seq_id >= self._next + MAX_WAITING:
            raise RequestError(f"seq_id: found {seq_id} while {self._next} has not come; try again", status=429)
        promise, is_new = self._promises.make(f"{self._model_id}:{seq_id}")
        if is_new and seq_id < self._next:
            raise RequestError(f"seq_id: found {seq_id}, whose result has expired; expected {self._next}", status=410)
        if is_new:
            self._waiting[seq_id] = (promise, work)
            self._came.set()
        return promise

    async def close(self, reason: str) -> None:
        """End the request that runs, and fail all that wait. An operation on the trainer runs to its end first."""
        self._runner.cancel()
        await asyncio.wait([self._runner])
        for promise, _ in self._waiting.values():
            await self._promises.end(promise, RequestError(reason))
        self._waiting.clear()

    async def _run(self) -> None:
        while True:
            while self._next not in self._waiting:
                self._came.clear()
                await self._came.wait()
            promise, work = self._waiting[self._next]
            outcome: Result | RequestError
            try:
                outcome = await work()
            except Exception as error:
                self._on_error(error)
                outcome = as_request_error(error)
            del self._waiting[self._next]
            self._next += 1
            await self._promises.end(promise, outcome)
