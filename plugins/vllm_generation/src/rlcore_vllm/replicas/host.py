"""`python -m rlcore_vllm.replicas.host`: an engine in a process of its own."""

import contextlib
import queue
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from rlcore.spi import DraftCounts, RlcoreError, WorkerError
from rlcore.spi.errors import ProblemsError
from rlcore_vllm.engines.sampling import Event, Samples
from rlcore_vllm.setup.settings import EngineSettings
from rlcore_workers.hosted import read_order, serve


class Host:
    """The engine as the parent calls it. Each call has a thread of its own."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._engine = _start(settings)
        self._calls: dict[int, Future[None]] = {}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def submit(self, number: int, samples: Samples) -> None:
        """Begin to sample; `collect` calls it by this number."""
        events = self._events

        def end(call: Future[None]) -> None:
            error = None if call.cancelled() else call.exception()
            if error is not None and (isinstance(error, ProblemsError) or not isinstance(error, RlcoreError)):
                error = WorkerError(str(error))  # the others cannot be pickled
            events.put(Event(number=number, is_last=True, error=error))

        call = self._engine.generate(
            samples,
            lambda finished: events.put(Event(number=number, finished=finished)),
            lambda sampled: events.put(Event(number=number, sampled=sampled)),
        )
        self._calls[number] = call
        call.add_done_callback(end)

    def collect(self, timeout_s: float) -> list[Event]:
        """Return the events since the last call, waiting for the first up to `timeout_s`."""
        events: list[Event] = []
        with contextlib.suppress(queue.Empty):
            events.append(self._events.get(timeout=timeout_s))
            while True:
                events.append(self._events.get_nowait())
        for event in events:
            if event.is_last:
                self._calls.pop(event.number, None)
        return events

    def cut(self, numbers: Sequence[int], sample: int | None = None) -> None:
        """End calls, or their sample of this number, with the tokens that their samples have."""
        known = (self._calls.get(number) for number in numbers)  # `collect` may forget one meanwhile
        self._engine.cut([call for call in known if call is not None], sample)

    def cancel(self, number: int) -> None:
        """Drop what has not ended."""
        if (call := self._calls.get(number)) is not None:
            call.cancel()

    def begin_update(self) -> None:
        self._engine.begin_update().result()

    def call_workers(self, method: str, kwargs: Mapping[str, Any]) -> list[Any]:
        try:
            return self._engine.call_workers(method, kwargs).result()
        except ProblemsError as error:
            # It cannot be pickled.
            raise WorkerError(str(error)) from error

    def end_update(self, versions: Mapping[int, int]) -> DraftCounts | None:
        return self._engine.end_update(versions).result()

    def set_residency(self, weights: bool, cache: bool, discard_weights: bool) -> int:
        return self._engine.set_residency(weights=weights, cache=cache, discard_weights=discard_weights).result()

    def restart(self) -> None:
        """Another engine in this process, which spares it the imports."""
        self._engine.close()
        self._calls.clear()
        self._engine = _start(self._settings)

    def close(self) -> None:
        """Free the engine; the parent then ends the process."""
        self._engine.close()


def _start(settings: EngineSettings) -> Any:
    from rlcore_vllm.engines.engine import Engine

    return Engine(settings)


def main() -> None:
    """Start the engine, then serve until the parent ends the process or ends itself."""
    order = read_order()
    serve(Host(order.settings), order, [name for name in vars(Host) if not name.startswith("_")])


if __name__ == "__mp_main__":
    # A rank of the engine has begun, which imports this module before it imports vLLM.
    from rlcore_vllm.engines.versions import import_without_torchao

    import_without_torchao()
if __name__ == "__main__":
    main()
