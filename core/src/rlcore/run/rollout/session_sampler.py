"""The generator's stream as the server of sessions sees it: each request joins what is generated."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from rlcore.run.rollout.request_feed import RequestFeed, Sampled, Wanted
from rlcore.sessions.errors import RequestError
from rlcore.sessions.sampling import Sample, SampleRequest


class SessionSampler:
    """Asks a feed for the samples of sessions. The feed belongs to it: a stream reads from it while sessions are served."""

    def __init__(self) -> None:
        self.feed = RequestFeed(self._hand_out)
        self._lock = threading.Lock()
        self._waiting: set[asyncio.Future[Sample]] = set()
        self._is_closed = False

    async def sample(self, request: SampleRequest) -> Sample:
        """See rlcore.sessions.sampling.Sampler."""
        future: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._is_closed:
                raise _ended()
            self._waiting.add(future)
        try:
            self.feed.ask(
                [
                    Wanted(
                        prompt=request.prompt,
                        seed=request.seed,
                        max_tokens=request.max_tokens,
                        sampling=request.sampling,
                        owner=future,
                        conversation=request.conversation,
                    )
                ]
            )
            return await future
        except asyncio.CancelledError:  # whoever asked has gone
            self.feed.withdraw(lambda wanted: wanted.owner is not future)
            raise
        finally:
            with self._lock:
                self._waiting.discard(future)

    def close(self) -> None:
        """Refuse what waits for a sample, and all that is asked for from now on."""
        with self._lock:
            self._is_closed = True
            waiting = list(self._waiting)
        for future in waiting:
            _tell(future, _ended())

    def _hand_out(self, samples: Sequence[Sampled]) -> None:
        for sampled in samples:
            owner: Any = sampled.wanted.owner
            sample = Sample(
                text=sampled.text,
                tokens=sampled.tokens,
                logprobs=sampled.logprobs,
                weight_versions=sampled.weight_versions,
                finish_reason=sampled.finish_reason,
            )
            _tell(owner, sample)


def _ended() -> RequestError:
    return RequestError(503, "generation has ended")


def _tell(future: "asyncio.Future[Sample]", outcome: Sample | RequestError) -> None:
    """Hand out what came of a request, on its own event loop."""

    def settle() -> None:
        if future.done():  # whoever asked has gone
            return
        if isinstance(outcome, RequestError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    loop = future.get_loop()
    if not loop.is_closed():
        loop.call_soon_threadsafe(settle)
