"""A monotonic clock that leaves out time in which the driver's own process was suspended."""

import threading
import time

LONGEST_LOOK_S = 5.0
"""Seconds between two looks, of whoever waits, from which on the driver stood still: it looks several times a second."""
COUNTED_S = 1.0
"""Seconds that such a while counts: where each look takes so long, as on a machine that swaps, every limit still has an end."""


class SuspendAwareClock:
    """Advances while somebody looks at it. A gap without a look counts as one second: nobody waited, or the process was
    stopped. From any thread."""

    def __init__(self) -> None:
        self._looking = threading.Lock()
        self._last = time.monotonic()
        self._left_out_s = 0.0

    def now(self) -> float:
        """Seconds, from some moment on."""
        with self._looking:
            now = time.monotonic()
            if now - self._last > LONGEST_LOOK_S:
                self._left_out_s += now - self._last - COUNTED_S
            self._last = now
            return now - self._left_out_s


suspend_aware_time = SuspendAwareClock().now
"""The clock by which all that wait for ranks measure."""
