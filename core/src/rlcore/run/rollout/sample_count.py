"""Counts requested samples, and measures the seconds with and without generation."""

import threading
import time


class SampleCount:
    """Counts from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_sampled = 0
        self._num_asked = 0
        """Samples asked for that have not come."""
        self._is_generating: bool | None = None
        """Whether a stream runs; None before the first."""
        self._since = time.perf_counter()
        self._idle_s = self._busy_s = self._stopped_s = 0.0

    def begin(self) -> None:
        """Count samples, idle and busy seconds anew."""
        with self._lock:
            self._pass()
            self._num_sampled, self._idle_s, self._busy_s = 0, 0.0, 0.0

    def ask(self, number: int) -> None:
        """So many more are asked for."""
        with self._lock:
            self._pass()
            self._num_asked += number

    def withdraw(self, number: int) -> None:
        """So many are asked for no longer."""
        self.ask(-number)

    def come(self, number: int, num_ended: int) -> tuple[int, int]:
        """So many have come, of which some have ended. Returns how many have ended since `begin`, and how many that makes with
        those which are asked for."""
        with self._lock:
            self._pass()
            self._num_asked -= number
            self._num_sampled += num_ended
            return self._num_sampled, self._num_sampled + self._num_asked

    def generating(self, is_generating: bool) -> None:
        """A stream begins, or has ended; it may be said several times over."""
        with self._lock:
            self._pass()
            self._is_generating = is_generating

    def stopped_s(self) -> float:
        """Seconds in which no stream ran, since the first did."""
        with self._lock:
            self._pass()
            return self._stopped_s

    def idle_s(self) -> float:
        """Seconds since `begin` in which no sample was asked for: what was waited for was the environment."""
        with self._lock:
            self._pass()
            return self._idle_s

    def busy_s(self) -> float:
        """Seconds since `begin` in which samples were generated: a stream ran, and some sample of it had not come."""
        with self._lock:
            self._pass()
            return self._busy_s

    def _pass(self) -> None:
        """Count the seconds since the last change."""
        now = time.perf_counter()
        passed, self._since = now - self._since, now
        if not self._num_asked:
            self._idle_s += passed
        elif self._is_generating:
            self._busy_s += passed
        if self._is_generating is False:
            self._stopped_s += passed
