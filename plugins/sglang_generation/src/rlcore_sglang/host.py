"""`python -m rlcore_sglang.host DESCRIPTOR`: an SGLang engine in a process of its own, which its parent calls over a socket.

SGLang takes signals, the way that processes start and all children of its process for itself, so that it gets a process where
nothing else has them. A message is (call, method, arguments), an answer (call, kind, content) with a kind of "sample", "result"
or "error".
"""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from rlcore_workers.descendants import end_with

READY = -1
"""The call that the answer of the start is for."""
IDLE_TIMEOUT_S = 60.0
"""Most seconds for the scheduler to become idle after the last sample."""


class Host:
    """The engine as the parent calls it. Each call is a task of SGLang's event loop."""

    def __init__(self, engine: Any, connection: Connection) -> None:
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._connection = connection
        self._generating: dict[int, asyncio.Task[None]] = {}
        self._is_updating = False
        self._is_away: set[str] = set()

    async def serve(self) -> None:
        """Answer until the parent closes the connection."""
        loop, closed = asyncio.get_running_loop(), asyncio.Event()

        def read() -> None:
            try:
                while True:
                    loop.call_soon_threadsafe(self._start, *self._connection.recv())
            except (EOFError, OSError):
                pass
            finally:  # also where a message cannot be read: the parent then sees that this process has ended
                loop.call_soon_threadsafe(closed.set)

        threading.Thread(target=read, daemon=True).start()
        self._connection.send((READY, "result", None))
        await closed.wait()

    def _start(self, call: int, method: str, arguments: Sequence[Any]) -> None:
        task = asyncio.ensure_future(self.answer(call, method, arguments))
        if method == "generate":
            self._generating[call] = task
            task.add_done_callback(lambda _task: self._generating.pop(call, None))

    async def answer(self, call: int, method: str, arguments: Sequence[Any]) -> None:
        """Make a call, and send what came of it."""
        try:
            kind, content = "result", await getattr(self, method)(call, *arguments)
        except asyncio.CancelledError:
            kind, content = "error", "cancelled"
        except BaseException as error:
            kind, content = "error", f"{type(error).__name__}: {error}"
        try:
            self._connection.send((call, kind, content))
        except Exception as error:  # nobody awaits this task
            self._connection.send((call, "error", f"its answer cannot be sent: {type(error).__name__}: {error}"))

    async def generate(self, call: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Sample, and send each sample as it ends."""
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
        self._connection.send((call, "sample", ended))

    async def abort(self, _call: int, number: int) -> None:
        """End a call of `generate`."""
        if number in self._generating:
            self._generating[number].cancel()

    async def begin_update(self, _call: int) -> None:
        """Wait until nothing is generated, and open an update of weights."""
        await self._settle()
        if self._is_updating:  # the one before failed
            await self.end_update(_call)
        await self._mark("begin_weight_update", "BeginWeightUpdateReqInput")
        self._is_updating = True

    async def load(self, _call: int, order: Mapping[str, Any]) -> None:
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

    async def end_update(self, _call: int) -> None:
        """Close the update of weights."""
        self._is_updating = False
        await self._mark("end_weight_update", "EndWeightUpdateReqInput")

    async def move(self, _call: int, away: Sequence[str]) -> None:
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

    async def num_cached_tokens(self, _call: int) -> int:
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


def main() -> None:
    """Start the engine with the arguments that come first, then serve until the parent closes the connection or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(os.getppid())  # also while the engine starts
    connection = Connection(int(sys.argv[1]))
    arguments = connection.recv()
    engine = _start_engine(arguments)
    try:
        engine.loop.run_until_complete(Host(engine, connection).serve())
    finally:
        os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
