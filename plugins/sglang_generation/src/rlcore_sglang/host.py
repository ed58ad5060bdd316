"""`python -m rlcore_sglang.host`: an SGLang engine in a process of its own.

SGLang takes signals, the way that processes start and all children of its process for itself, so that it gets a process where
nothing else has them.
"""

import asyncio
import contextlib
import os
import queue
import signal
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from rlcore_workers.hosted import read_order, serve

IDLE_TIMEOUT_S = 60.0
"""Most seconds for the scheduler to become idle after the last sample."""


class Host:
    """The engine as the parent calls it. Each call has a thread of its own, and is a task of SGLang's event loop."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._generating: dict[int, asyncio.Task[None]] = {}
        self._events: dict[int, queue.SimpleQueue[tuple[str, Any]]] = {}
        """By the calls of `submit` that are not collected to their end."""
        self._is_updating = False
        self._is_away: set[str] = set()

    def call(self, method: str, *arguments: Any) -> Any:
        """Return what a method returns that the event loop runs."""
        return asyncio.run_coroutine_threadsafe(_told(getattr(self, method)(*arguments)), self._engine.loop).result()

    def collect(self, number: int, timeout_s: float) -> list[tuple[str, Any]]:
        """Return the events of a call of `submit` since the last time, waiting for the first up to `timeout_s`: ("sample",
        content), and at its end ("over", the failure or None)."""
        events, found = self._events[number], []
        with contextlib.suppress(queue.Empty):
            found.append(events.get(timeout=timeout_s))
            while True:
                found.append(events.get_nowait())
        if found and found[-1][0] == "over":
            self._events.pop(number, None)
        return found

    async def submit(self, number: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Begin to sample; `collect` calls it by this number."""
        events = self._events[number] = queue.SimpleQueue()

        def end(task: asyncio.Task[None]) -> None:
            del self._generating[number]
            error = "cancelled" if task.cancelled() else task.exception()
            events.put(("over", None if error is None else str(error)))

        task = self._generating[number] = asyncio.ensure_future(_told(self._generate(number, samples)))
        task.add_done_callback(end)

    async def cancel(self, number: int) -> None:
        """End a call of `submit`, which nobody collects any more."""
        self._events.pop(number, None)
        if number in self._generating:
            self._generating[number].cancel()

    async def _generate(self, call: int, samples: Sequence[Mapping[str, Any]]) -> None:
        tasks = [asyncio.ensure_future(self._sample(call, sample)) for sample in samples]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for sample in samples:
                self._manager.abort_request(_name(call, sample))
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _sample(self, call: int, sample: Mapping[str, Any]) -> None:
        found = await self._engine.async_generate(
            input_ids=sample["prompt"], sampling_params=sample["sampling"], return_logprob=True, rid=_name(call, sample)
        )
        logprobs = [logprob for logprob, *_ in found["meta_info"]["output_token_logprobs"]]
        ended = (sample["number"], found["output_ids"], logprobs, found["meta_info"]["finish_reason"])
        if (events := self._events.get(call)) is not None:
            events.put(("sample", ended))

    async def begin_update(self) -> None:
        """Wait until nothing is generated, and open an update of weights."""
        await self._settle()
        if self._is_updating:  # the one before failed
            await self.end_update()
        await self._mark("begin_weight_update", "BeginWeightUpdateReqInput")
        self._is_updating = True

    async def load(self, order: Mapping[str, Any]) -> None:
        """Have the scheduler processes carry out an order of `scheduler.load`."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        from rlcore_sglang.scheduler import LOADER, order_tensor

        named = [("order", order_tensor(order))]
        payloads = [MultiprocessingSerializer.serialize(named) for _ in range(self._engine.server_args.tp_size)]
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads, load_format=LOADER, flush_cache=order["step"] == "end"
        )
        _require("update_weights_from_tensor", await self._manager.update_weights_from_tensor(request))

    async def end_update(self) -> None:
        """Close the update of weights."""
        self._is_updating = False
        await self._mark("end_weight_update", "EndWeightUpdateReqInput")

    async def move(self, away: Sequence[str]) -> None:
        """Free the device memory of these parts, "weights" or "kv_cache", and take back that of the others."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput

        await self._settle()
        if gone := sorted(set(away) - self._is_away):
            await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=gone))
        if back := sorted(self._is_away - set(away)):
            await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=back))
        self._is_away = set(away)

    async def _settle(self) -> None:
        """Wait until the scheduler is idle, which may be a batch after its last sample has come; it drops its cache."""
        await asyncio.gather(*self._generating.values(), return_exceptions=True)
        answer = await self._manager.flush_cache(timeout_s=IDLE_TIMEOUT_S)
        _require("flush_cache", (answer.success, answer.message))

    async def _mark(self, method: str, request: str) -> None:
        """Open or close an update of weights, where this version of SGLang asks for it."""
        from sglang.srt.managers import io_struct

        if hasattr(io_struct, request):
            _require(method, await getattr(self._manager, method)(getattr(io_struct, request)()))

    async def num_cached_tokens(self) -> int:
        """Tokens that the KV cache has room for."""
        (info, *_) = self._engine._scheduler_init_result.scheduler_infos
        return int(info["max_total_num_tokens"])


def _name(call: int, sample: Mapping[str, Any]) -> str:
    return f"{call}-{sample['number']}-end"


def _require(what: str, answer: tuple[bool, str]) -> None:
    """RuntimeError where SGLang says that it has not done something."""
    succeeded, message = answer
    if not succeeded:
        raise RuntimeError(f"SGLang refused {what}: {message}")


def _start_engine(arguments: Mapping[str, Any]) -> Any:
    from sglang.srt.entrypoints.engine import Engine

    from rlcore_sglang.scheduler import run_scheduler

    class StoppedByRequests(Engine):  # type: ignore[misc]
        run_scheduler_process_func = staticmethod(run_scheduler)

    return StoppedByRequests(**arguments)


async def _told(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result. RuntimeError for what it raises: the parent may not be able to read that, and it may end the loop."""
    try:
        return await coroutine
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def main() -> None:
    """Start the engine, then serve until the parent ends the process or ends itself."""
    order = read_order()
    engine = _start_engine(order.settings)
    threading.Thread(target=serve, args=(Host(engine), order, ("call", "collect")), name="calls", daemon=True).start()
    try:
        engine.loop.run_forever()
    finally:
        os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
