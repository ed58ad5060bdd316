"""Starting engines anew in a thread, so that what they failed in can be told before."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

logger = logging.getLogger(__name__)

Restart: TypeAlias = Callable[[], None]


class BackgroundRestart:
    """One restart after another. Whoever needs the engines waits for them at the lock."""

    def __init__(self, changing: threading.Lock) -> None:
        """`changing` is held while engines are restarted, from the first restart that was begun to the last."""
        self._changing = changing
        self._lock = threading.Lock()
        """Held while a restart begins, and while the thread looks for the next one."""
        self._due: deque[Restart] = deque()
        self._thread: threading.Thread | None = None
        self._is_under_way = self._has_ended = False

    def begin(self, claim: Callable[[], Restart]) -> None:
        """Call `claim` while `changing` is held, and run its result in a thread. An engine that does not start fails the next
        refit, which starts it again."""
        with self._lock:
            if self._has_ended:
                return
            if not self._is_under_way:
                self._hold()
            # The thread holds the lock by now, and changes nothing but the engines that it starts.
            self._due.append(claim())

    @property
    def is_under_way(self) -> bool:
        """Return whether engines are being started."""
        return self._is_under_way

    def end(self) -> None:
        """Begin none any more, and wait until none is under way."""
        with self._lock:
            self._has_ended = True
            thread = self._thread
        if thread is not None:
            thread.join()

    def _hold(self) -> None:
        """Return once a thread holds `changing`."""
        is_held = threading.Event()

        def run() -> None:
            with self._changing:
                is_held.set()
                while (restart := self._next()) is not None:
                    try:
                        restart()
                    except BaseException:  # the next restart needs this thread
                        logger.exception("an engine was not started anew; the next refit tries again")

        self._thread = threading.Thread(target=run, name="rlcore-vllm-restart", daemon=True)
        self._is_under_way = True
        self._thread.start()
        is_held.wait()

    def _next(self) -> Restart | None:
        with self._lock:
            if self._due:
                return self._due.popleft()
            self._is_under_way = False
            return None
