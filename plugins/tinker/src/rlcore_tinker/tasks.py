"""Tasks of an event loop that nobody awaits."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Tasks:
    """Keeps tasks until they end: an event loop itself holds them only weakly."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine beside the others."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def uninterrupted(work: Coroutine[Any, Any, T]) -> T:
    """Return a coroutine's result. A cancellation waits until it has ended: its steps belong together."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # else asyncio logs an exception that was never retrieved
        raise
