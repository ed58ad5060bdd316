"""Probe all endpoints of a section once, then request samples from them on one event loop."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import aiohttp

from rlcore.secrets import keep_secret
from rlcore.spi import ConfigError
from rlcore_openai.config import OpenAIConfig
from rlcore_openai.endpoint import Endpoint
from rlcore_openai.endpoint_pool import EndpointPool
from rlcore_openai.probe import Probed, probe
from rlcore_openai.samples import CompletionRequest, Sample
from rlcore_openai.tokenizer import Decode

ResultT = TypeVar("ResultT")


class Endpoints:
    """Answers samples, each by one of the endpoints. Any thread may call."""

    def __init__(self, config: OpenAIConfig, max_sequence_length: int, decode: Decode, vocab_size: int | None = None) -> None:
        """Probe each endpoint. ConfigError lists what any of them lacks. `vocab_size` is the model's, where it is known."""
        self._config = config
        self._vocab_size = vocab_size
        self._loop = asyncio.new_event_loop()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run_loop, daemon=True, name="rlcore-openai")
        self._thread.start()
        self._session: aiohttp.ClientSession | None = None
        try:
            self.probed: Probed = self.run(self._open(max_sequence_length, decode))
        except BaseException:
            self.close()
            raise

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Return what a coroutine does on the loop; it is cancelled where the caller is interrupted."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(self, work: Coroutine[Any, Any, ResultT]) -> "Future[ResultT]":
        """Begin a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def sample(self) -> Sample:
        """Return an empty sample."""
        return Sample(vocab_size=self._vocab_size)

    async def complete(self, wanted: CompletionRequest, sample: Sample) -> Sample:
        """Fill a sample, in several attempts where it has to be. WorkerError where none succeeds, PluginError where an endpoint
        refuses."""

        async def once(endpoint: Endpoint) -> Sample:
            sample.tokens, sample.logprobs, sample.text = [], [], ""
            await endpoint.complete(wanted, sample)
            return sample

        # The one that has had the sample's conversation, in whose cache its beginning may be.
        first = self._pool.endpoints[wanted.conversation % len(self._pool.endpoints)] if wanted.conversation >= 0 else None
        return await self._pool.answer(once, first)

    def close(self) -> None:
        """Close the connections and end the loop."""
        if self._thread.is_alive():
            self.run(self._close())
            self._is_closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run_loop(self) -> None:
        """Run the event loop until `close`. A SystemExit in a task is the task's result, and would end the loop too."""
        while not self._is_closed:
            with suppress(BaseException):
                self._loop.run_forever()

    async def _open(self, max_sequence_length: int, decode: Decode) -> Probed:
        config = self._config
        key = keep_secret(os.environ.get(config.api_key_env, "")) if config.api_key_env else ""
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        endpoints = [
            Endpoint(
                url=url.rstrip("/"),
                session=self._session,
                key=key,
                timeout_s=config.timeout_s,
                places=asyncio.Semaphore(config.max_concurrent),
            )
            for url in config.base_urls
        ]
        self._pool = EndpointPool(endpoints=endpoints, max_attempts=config.max_attempts, expected="a sample")
        found = await asyncio.gather(
            *(probe(endpoint, config.model, max_sequence_length, decode, self.sample()) for endpoint in endpoints)
        )
        problems = [problem for one in found for problem in one.problems]
        if problems:
            raise ConfigError(problems)
        return Probed(tells_raw=any(one.tells_raw for one in found))

    async def _close(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
