"""The calls of a session as coroutines."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial, wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from rlcore_session.prompts import SampleOptions
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


class AsyncSession:
    """A session whose calls are coroutines. Many may be under way: calls of the trainer go in their order, and samples of
    several calls are generated together."""

    def __init__(self, session: Session) -> None:
        self.session = session
        """The session itself."""

    async def sample(
        self,
        prompts: Sequence[Any],
        *,
        num_samples: int = 1,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] | None = None,
        seed: int | None = None,
    ) -> list[list[Completion]]:
        """See Session."""
        options = SampleOptions(
            num_samples=num_samples,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            stop=stop,
            stop_token_ids=stop_token_ids,
            seed=seed,
        )
        return grouped(await asyncio.wrap_future(self.session.begin_sampling(prompts, options)), num_samples)

    logprobs = _awaited(Session.logprobs)
    forward_backward = _awaited(Session.forward_backward)
    optim_step = _awaited(Session.optim_step)
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
