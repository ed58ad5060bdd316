"""The generator's stream as a session server sees it: each request joins what is generated."""

import asyncio
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from rlcore.spi import FinishReason, SamplingMask, TokenReader
from rlcore_rollout.episode import Completion, CompletionRequest, Decode, until_stop
from rlcore_rollout.request_queue import RequestQueue, SampleCount
from rlcore_rollout.step_plans import seed_after
from rlcore_serve.sessions.interface import Sample, SampleRequest


class SessionSampler:
    """Asks a queue for the samples of sessions. The queue belongs to it: streams read from it while sessions are served, one
    after another. What a stream's end cuts off goes on in the next one."""

    def __init__(self, decode: Decode, *, sampling_mask: bool = False, streams_tokens: bool = False) -> None:
        """`decode` returns the text of tokens, without special tokens; `sampling_mask`: whether samples are to say what each
        token was chosen among; `streams_tokens`: whether the generator has the capability `token_streaming`."""
        self._streams_tokens = streams_tokens
        self._sampling_mask = sampling_mask
        self.requests = RequestQueue(self._on_completions)
        self.count = SampleCount()
        self._decode = decode
        self._lock = threading.Lock()
        self._waiting: dict[asyncio.Future[Completion | None], int] = {}
        """The awaited completions, each with its session."""
        self._is_closed = False

    async def sample(self, request: SampleRequest) -> Sample | None:
        """See the interface of Sampler."""
        said: list[Completion] = []
        while True:
            sampled = await self._ask(request, said)
            if sampled is None:
                return None
            sampled = until_stop([part.tokens for part in said], sampled, self._decode)
            if sampled.finish_reason is FinishReason.ABORTED and request.sampling.json_schema is not None:
                if request.on_tokens is not None:
                    return None  # its client has read some of the tokens
                said = []  # a schema begins with its sample, so that a part of one cannot go on
                continue
            said.append(sampled)
            if sampled.finish_reason is not FinishReason.ABORTED:
                return self._joined(said)

    async def _ask(self, request: SampleRequest, said: Sequence[Completion]) -> Completion | None:
        """Ask for the continuation of a sample, which has some parts; None where it is refused."""
        future: asyncio.Future[Completion | None] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._is_closed:
                return None
            self._waiting[future] = request.conversation
        num_said = sum(len(part.tokens) for part in said)
        wanted = CompletionRequest(
            # Samples of one request share its array, and so a prompt.
            prompt=np.concatenate([request.prompt, *(part.tokens for part in said)]) if said else request.prompt,
            seed=seed_after(request.seed, num_said),
            max_tokens=request.max_tokens - num_said,
            sampling=request.sampling,
            owner=future,
            conversation=request.conversation,
            sampling_mask=self._sampling_mask,
            goes_on=request.goes_on or num_said > 0,
            reader=self._reader(request, num_said) if self._streams_tokens else None,
        )
        completion = None
        try:
            self.count.ask(1)
            self.requests.ask([wanted])
            completion = await future
            return completion
        finally:
            if completion is None:  # whoever asked has gone, or is refused
                self.count.withdraw(self.requests.withdraw(lambda waiting: waiting is not wanted))
                if wanted.reader is not None:
                    wanted.reader.cancelled.set_result(None)
            with self._lock:
                self._waiting.pop(future, None)

    @staticmethod
    def _reader(request: SampleRequest, num_said: int) -> TokenReader:
        """Return the reader of a sample's continuation behind so many tokens."""
        on_tokens = request.on_tokens
        if on_tokens is None:
            return TokenReader()
        return TokenReader(
            on_tokens=lambda first, tokens, logprobs: on_tokens(num_said + first, tokens, logprobs),
            num_logprobs=request.num_logprobs,
            on_prompt=None if num_said else request.on_prompt,
        )

    def give_up(self, session: int) -> None:
        """Refuse what a session still waits for. From any thread."""
        self._refuse(session)

    def open(self) -> None:
        """Take requests, as it does until `close`."""
        with self._lock:
            self._is_closed = False

    def close(self) -> None:
        """Refuse what waits for a sample, and all that is asked for from now on."""
        with self._lock:
            self._is_closed = True
        self._refuse()

    def _refuse(self, session: int | None = None) -> None:
        with self._lock:
            waiting = [future for future, owner in self._waiting.items() if session in (None, owner)]
        for future in waiting:
            _settle(future, None)

    def _joined(self, said: Sequence[Completion]) -> Sample:
        """The parts of a sample as one."""
        tokens, logprobs, versions = (
            np.concatenate([getattr(part, name) for part in said]) for name in ("tokens", "logprobs", "weight_versions")
        )
        masks = [part.sampling_mask for part in said if part.sampling_mask is not None]
        return Sample(
            text=said[0].text if len(said) == 1 else self._decode(tokens),
            tokens=tokens,
            logprobs=logprobs,
            weight_versions=versions,
            finish_reason=said[-1].finish_reason,
            sampling_mask=SamplingMask.join(masks) if masks else None,
        )

    def _on_completions(self, samples: Sequence[Completion]) -> None:
        self.count.add_arrived(len(samples), len(samples))
        for sampled in samples:
            future: Any = sampled.request.owner
            _settle(future, sampled)


def _settle(future: "asyncio.Future[Completion | None]", completion: Completion | None) -> None:
    """Set a future's result, on its own event loop."""
    with suppress(RuntimeError):  # the loop is closed
        # A future that is done belongs to someone who has gone.
        future.get_loop().call_soon_threadsafe(lambda: None if future.done() else future.set_result(completion))
