"""Calls that come one by one, answered in batches by one worker process."""

import asyncio
from collections.abc import Sequence
from typing import Any

from rlcore.spi import PluginError
from rlcore_workers.pool import WorkerPool


class Batches:
    """Gathers what comes while the process works, and hands it over together. One for each event loop."""

    def __init__(self, pool: WorkerPool, most: int) -> None:
        self._pool, self._most = pool, most
        self._waiting: list[tuple[Any, asyncio.Future[Any]]] = []
        self._runner: asyncio.Task[None] | None = None
        self._asked: asyncio.Task[Any] | None = None
        self._under_way: Sequence[asyncio.Future[Any]] = ()

    async def ask(self, item: Any) -> Any:
        """The answer to one item. Where this is cancelled, so is the batch that it is in, once nobody else waits for it."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, answer))
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run())
        try:
            return await answer
        except asyncio.CancelledError:
            self._give_up(answer)
            raise

    def _give_up(self, answer: "asyncio.Future[Any]") -> None:
        answer.cancel()
        self._waiting = [pair for pair in self._waiting if pair[1] is not answer]
        if self._asked is not None and self._under_way and all(each.done() for each in self._under_way):
            self._asked.cancel()  # its process is killed, which may hang; the next batch starts another

    async def _run(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
            self._under_way = [answer for _, answer in batch]
            self._asked = asked = asyncio.create_task(self._pool.call([item for item, _ in batch]))
            await asyncio.wait([asked])
            found = None if asked.cancelled() else asked.exception() or asked.result()
            if isinstance(found, list) and len(found) != len(batch):
                found = PluginError(f"the reward model's process answered {len(found)} of {len(batch)} samples")
            for number, (_, answer) in enumerate(batch):
                if answer.done():
                    continue
                if found is None:
                    answer.cancel()
                elif isinstance(found, BaseException):
                    answer.set_exception(found)
                else:
                    answer.set_result(found[number] if isinstance(found, list) else found)
