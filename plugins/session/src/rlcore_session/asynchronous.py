"""The calls of a session as coroutines."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial, wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from rlcore_session.records import Completion
from rlcore_session.session import Session, grouped

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


def _awaited(
    method: Callable[Concatenate[Session, P], ResultT],
) -> Callable[Concatenate["AsyncSession", P], Coroutine[Any, Any, ResultT]]:
    """Return the coroutine function of a session's method, which runs in the trainer's thread."""

    @wraps(method)
    async def call(self: "AsyncSession", /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        session = self.session
        return await asyncio.wrap_future(session.submit(partial(method, session, *args, **kwargs)))

    return call


def _awaited_samples(
    method: Callable[Concatenate[Session, P], list[list[Completion]]],
) -> Callable[Concatenate["AsyncSession", P], Coroutine[Any, Any, list[list[Completion]]]]:
    """Return the coroutine function of Session.sample, which takes no thread while it waits."""

    @wraps(method)
    async def call(self: "AsyncSession", /, *args: P.args, **kwargs: P.kwargs) -> list[list[Completion]]:
        options: Any = kwargs
        completions = await asyncio.wrap_future(self.session.begin_sampling(*args, **options))
        return grouped(completions, options.get("num_samples", 1))

    return call


class AsyncSession:
    """A session whose calls are coroutines. Many may be under way: calls of the trainer go in their order, and samples of
    several calls are generated together."""

    def __init__(self, session: Session) -> None:
        self.session = session
        """The session itself."""

    sample = _awaited_samples(Session.sample)
    logprobs = _awaited(Session.logprobs)
    forward_backward = _awaited(Session.forward_backward)
    forward_backward_together = _awaited(Session.forward_backward_together)
    optim_step = _awaited(Session.optim_step)
    record = _awaited(Session.record)
    use_adapter = _awaited(Session.use_adapter)
    sync = _awaited(Session.sync)
    save = _awaited(Session.save)
    load = _awaited(Session.load)
    export = _awaited(Session.export)

    async def close(self) -> None:
        """See Session."""
        await asyncio.to_thread(self.session.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
