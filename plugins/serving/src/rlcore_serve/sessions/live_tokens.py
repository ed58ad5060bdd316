"""The tokens of a request's samples as the generator samples them, brought to the server's event loop."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from attrs import evolve

from rlcore_serve.sessions.interface import SampleRequest

Logprobs = Mapping[int, float]
"""Log-probabilities by token."""


class LiveTokens:
    """The tokens of S samples so far, with the log-probabilities that were asked for. It belongs to one event loop."""

    def __init__(self, num_samples: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_samples)]
        self.logprobs: list[list[Logprobs]] = [[] for _ in range(num_samples)]
        self.prompt: Sequence[Logprobs] | None = None
        """Log-probabilities of the prompt's tokens from the second on; None until they have come."""
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def read_by(
        self, wanted: Sequence[SampleRequest], num_logprobs: int | None, num_of_prompt: int | None = None
    ) -> list[SampleRequest]:
        """Return the requests of the S samples, whose tokens come here; with `num_of_prompt`, the log-probabilities of the
        prompt's tokens and of so many most probable ones come with the first sample."""
        read = [
            evolve(one, on_tokens=partial(self._from_thread, number), num_logprobs=num_logprobs)
            for number, one in enumerate(wanted)
        ]
        if num_of_prompt is not None:
            most = max(num_of_prompt, num_logprobs or 0)
            read[0] = evolve(read[0], num_logprobs=most, on_prompt=partial(setattr, self, "prompt"))
        return read

    async def changed(self) -> None:
        """Wait until tokens have come since the last call."""
        await self._changed.wait()
        self._changed.clear()

    def _from_thread(self, number: int, first: int, tokens: Sequence[int], logprobs: Sequence[Logprobs]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._add, number, first, tokens, logprobs)

    def _add(self, number: int, first: int, tokens: Sequence[int], logprobs: Sequence[Logprobs]) -> None:
        known = len(self.tokens[number]) - first
        if known >= 0:  # a stream that failed samples the same tokens again; what is missing comes with the whole answer
            self.tokens[number] += tokens[known:]
            self.logprobs[number] += logprobs[known:]
            self._changed.set()
