"""Starting engines anew in a thread, so that what they failed in can be told before."""

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class BackgroundRestart:
    """One restart after another. Whoever needs the engines waits for them at the lock."""

    def __init__(self, changing: threading.Lock) -> None:
        """`changing` is held while engines are restarted."""
        self._changing = changing
        self._thread: threading.Thread | None = None

    def begin(self, restart: Callable[[], None]) -> None:
        """Begin; returns once the lock is held. An engine that does not start is missing in the next refit, which tells of it
        and tries again."""
        has_begun = threading.Event()

        def run() -> None:
            with self._changing:
                has_begun.set()
                try:
                    restart()
                except Exception:
                    logger.exception("an engine was not started anew; the next refit tries again")

        self._thread = threading.Thread(target=run, name="rlcore-vllm-restart", daemon=True)
        self._thread.start()
        has_begun.wait()

    @property
    def is_under_way(self) -> bool:
        """Whether engines are being started."""
        return self._thread is not None and self._thread.is_alive()

    def join(self) -> None:
        """Wait until none is under way."""
        if self._thread is not None:
            self._thread.join()
