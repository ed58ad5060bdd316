"""Runs a slow function in a thread, so that the event loop is not blocked."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


async def off_loop(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a function in a thread, and wait without blocking the event loop. Cancellation waits until the function has ended,
    so that semaphores around the call stay held until then."""
    call = asyncio.get_running_loop().run_in_executor(None, partial(function, *args, **kwargs))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait([call])
        if not call.cancelled():
            call.exception()  # else asyncio logs an exception that was never retrieved
        raise
