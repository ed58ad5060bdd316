"""A generator's stream in a thread of its own."""

import threading
from collections.abc import Callable

from rlcore.spi.execution import GeneratorGroup
from rlcore_rollout.request_queue import RequestQueue


class BackgroundStream:
    """One stream after another over the same queue."""

    def __init__(self, feed: RequestQueue, on_end: Callable[[], None]) -> None:
        """`on_end` is called in the stream's thread once it has ended, for whatever reason."""
        self._requests = feed
        self._on_end = on_end
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._generator: GeneratorGroup | None = None

    @property
    def is_usable(self) -> bool:
        """Return whether another stream may begin: the generator of the last one is in a known state."""
        return self._generator is None or self._generator.is_usable

    @property
    def has_begun(self) -> bool:
        """Return whether a stream has begun that `end` has not ended."""
        return self._thread is not None

    @property
    def has_failed(self) -> bool:
        """Return whether that stream ended by an error, which `end` raises."""
        return self._error is not None

    def begin(self, generator: GeneratorGroup, weight_version: int) -> None:
        """Begin a stream; that of the queue has begun. Returns once the generator is at it, or has failed: an earlier refit
        would bring weights that the stream does not begin with."""
        self._generator = generator
        self._thread = threading.Thread(
            target=self._run, args=(generator, weight_version), name="generation-stream", daemon=True
        )
        self._thread.start()
        self._requests.first_take.wait()

    def end(self) -> None:
        """End the stream, once what has not ended has come back. Raises what it raised."""
        if self._thread is None:
            return
        self._requests.end()
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, generator: GeneratorGroup, weight_version: int) -> None:
        try:
            generator.stream(self._requests, weight_version)
        except BaseException as error:  # which would be lost in this thread
            self._error = error
        self._requests.first_take.set()
        try:
            self._on_end()
        except BaseException as error:
            self._error = self._error or error
