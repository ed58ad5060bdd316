"""The futures of requests: each has an id, a result that is kept for some time, and clients that wait for it."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

from attrs import define, field, frozen

from rlcore_tinker.errors import RequestError
from rlcore_tinker.wire import CONTENT_TYPE

KEEP_S = 3600.0
"""Seconds for which a result is kept. A client that asks later gets the error of an expired future."""
POLL_S = 20.0
"""Most seconds that one request waits for a result."""


@frozen(kw_only=True)
class Result:
    """The body of a result."""

    content: bytes
    content_type: str

    @classmethod
    def json(cls, body: Any) -> "Result":
        """Return a result in JSON."""
        return cls(content=json.dumps(body).encode(), content_type="application/json")

    @classmethod
    def proto(cls, message: Any) -> "Result":
        """Return a result as a protobuf message."""
        return cls(content=message.SerializeToString(), content_type=CONTENT_TYPE)


@define(kw_only=True, eq=False)
class Promise:
    """One request's future."""

    request_id: str
    sampler: tuple[str, int] | None = None
    """The sampling session of a sample request, and the number of the client's clone there; None for other requests."""
    result: Result | None = None
    ended_s: float | None = None
    """When it ended, on the monotonic clock; None before."""
    is_failed: bool = False
    _ended: asyncio.Event = field(factory=asyncio.Event, init=False)

    async def wait(self, timeout_s: float) -> Result | None:
        """Return the result, or None where there is none by then."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            return None
        return self.result

    def end(self, result: Result, *, is_failed: bool = False) -> None:
        """Set the result, once: a promise that was cancelled keeps that result."""
        if self.ended_s is None:
            self.result, self.is_failed, self.ended_s = result, is_failed, time.monotonic()
            self._ended.set()


@define(eq=False)
class _Ends:
    """The samples of one clone that ended, in the order of ending."""

    promises: list[Promise] = field(factory=list)
    """Those that the client has not seen."""
    num_seen: int = 0

    @property
    def cursor(self) -> int:
        """Number of samples that ended."""
        return self.num_seen + len(self.promises)

    def forget(self, cursor: int) -> None:
        """Drop those up to a cursor that the client has returned."""
        self._drop(max(min(cursor - self.num_seen, len(self.promises)), 0))

    def expire(self, limit_s: float) -> None:
        """Drop those that ended before a time: a client that asks for each future never returns a cursor."""
        self._drop(sum(promise.ended_s is not None and promise.ended_s < limit_s for promise in self.promises))

    def _drop(self, number: int) -> None:
        del self.promises[:number]
        self.num_seen += number


class Promises:
    """All futures, by their ids."""

    def __init__(self, keep_s: float = KEEP_S) -> None:
        """Results are kept for `keep_s` seconds."""
        self._keep_s = keep_s
        self._promises: dict[str, Promise] = {}
        self._swept_s = time.monotonic()
        self._ends: dict[tuple[str, int], _Ends] = {}
        """The samples that have ended, by sampling session and clone."""
        self._changed = asyncio.Condition()

    def make(self, request_id: str, sampler: tuple[str, int] | None = None) -> tuple[Promise, bool]:
        """Return the future of an id, and whether it is a new one: a request that comes twice has one future."""
        self._drop_expired()
        is_new = request_id not in self._promises
        if is_new:
            self._promises[request_id] = Promise(request_id=request_id, sampler=sampler)
        return self._promises[request_id], is_new

    def find(self, request_id: str) -> Promise:
        """Return the future of an id. RequestError with status 410 where it expired, or was never made."""
        self._drop_expired()
        if request_id not in self._promises:
            raise RequestError(
                f"request_id: found {request_id!r:.120}, a future that has expired or that this server never made; expected "
                f"one whose result is at most {self._keep_s:g} s old",
                status=410,
            )
        return self._promises[request_id]

    async def end(self, promise: Promise, outcome: Result | RequestError) -> None:
        """Set a future's result, or the error that it failed with."""
        if promise.ended_s is not None:
            return
        if isinstance(outcome, RequestError):
            promise.end(Result.json(outcome.body()), is_failed=True)
        else:
            promise.end(outcome)
        if promise.sampler is not None:
            self._ends.setdefault(promise.sampler, _Ends()).promises.append(promise)
            async with self._changed:
                self._changed.notify_all()

    async def ended_after(self, sampler: tuple[str, int], cursor: int, timeout_s: float) -> tuple[list[dict[str, Any]], int]:
        """Wait for samples of a clone that ended behind the cursor, and return them with the next cursor."""
        ends = self._ends.setdefault(sampler, _Ends())
        ends.forget(cursor)
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: ends.cursor > cursor)
        except TimeoutError:
            return [], cursor
        return list(_completions(ends.promises)), ends.cursor

    def _drop_expired(self) -> None:
        now = time.monotonic()
        if now - self._swept_s < self._keep_s / 60:
            return
        self._swept_s, limit = now, now - self._keep_s
        for request_id, promise in [*self._promises.items()]:
            if promise.ended_s is not None and promise.ended_s < limit:
                del self._promises[request_id]
        for ends in self._ends.values():
            ends.expire(limit)


def _completions(ended: list[Promise]) -> Iterator[dict[str, Any]]:
    for promise in ended:
        if promise.is_failed:
            yield {"state": "failed", "request_id": promise.request_id}
        else:
            size = len(promise.result.content) if promise.result is not None else 0
            yield {"state": "finished", "request_id": promise.request_id, "response_payload_uncompressed_size": size}
