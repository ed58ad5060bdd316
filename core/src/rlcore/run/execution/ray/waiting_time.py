"""A clock for how long the driver has waited: time in which its own process stood still is no rank's lateness."""

import threading
import time

LONGEST_LOOK_S = 5.0
"""Seconds between two looks, of whoever waits, from which on the driver stood still: it looks several times a second."""


class WaitingClock:
    """Goes on while somebody looks at it. Where nobody has for a while, nobody has waited, or the process was stopped. From any
    thread."""

    def __init__(self) -> None:
        self._looking = threading.Lock()
        self._last = time.monotonic()
        self._left_out_s = 0.0

    def now(self) -> float:
        """Seconds, from some moment on."""
        with self._looking:
            now = time.monotonic()
            if now - self._last > LONGEST_LOOK_S:
                self._left_out_s += now - self._last
            self._last = now
            return now - self._left_out_s


waiting_time = WaitingClock().now
"""The clock by which all that wait for ranks measure."""
