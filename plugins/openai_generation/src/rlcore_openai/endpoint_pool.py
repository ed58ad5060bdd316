"""Endpoints that share requests: each request goes to one of them, and a lost one to another."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from attrs import frozen

from rlcore.spi import PluginError, WorkerError
from rlcore_openai.endpoint import Endpoint
from rlcore_openai.errors import LostAnswerError, WrongAnswerError

AnswerT = TypeVar("AnswerT")
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 60.0


@frozen(kw_only=True)
class EndpointPool:
    """Endpoints with the same model. All calls are made on one event loop."""

    endpoints: Sequence[Endpoint]
    max_attempts: int
    """Attempts per request."""
    expected: str
    """The answer that is expected, for errors."""

    async def answer(self, request: Callable[[Endpoint], Awaitable[AnswerT]], first: Endpoint | None = None) -> AnswerT:
        """Return what a request gives, in several attempts where it has to be. WorkerError where none succeeds, PluginError
        where an endpoint refuses."""
        endpoint, pause_s = first or self._least_loaded(), FIRST_PAUSE_S
        for attempt in range(1, self.max_attempts + 1):
            endpoint.num_under_way += 1
            try:
                return await request(endpoint)
            except WrongAnswerError as error:
                raise PluginError(f"{endpoint.url}: found {error}; expected {self.expected}") from error
            except LostAnswerError as error:
                if attempt == self.max_attempts:
                    raise WorkerError(f"{endpoint.url} did not answer in {attempt} attempts: {error}") from error
                wait_s = error.retry_after_s if error.retry_after_s is not None else pause_s * random.uniform(0.5, 1.0)
            finally:
                endpoint.num_under_way -= 1
            await asyncio.sleep(min(wait_s, LONGEST_PAUSE_S))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            endpoint = self._least_loaded(other_than=endpoint)
        raise AssertionError("unreachable: max_attempts is at least 1")

    def _least_loaded(self, other_than: Endpoint | None = None) -> Endpoint:
        others = [endpoint for endpoint in self.endpoints if endpoint is not other_than]
        return min(others or self.endpoints, key=lambda endpoint: endpoint.num_under_way)
