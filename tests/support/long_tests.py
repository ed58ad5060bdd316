"""Names of tests that take long, while they run: of a run that someone ends from outside nothing else would tell."""

import time
from threading import Event, Thread

import pytest

INTERVAL_S = 300.0
"""Seconds after which a test is named, and named again."""


class LongTests:
    """Prints tests that started `interval_s` seconds ago and have not ended, once in each interval."""

    def __init__(self, config: pytest.Config, interval_s: float = INTERVAL_S) -> None:
        self._config, self._interval_s = config, interval_s
        self._starts: dict[str, float] = {}
        self._ended = Event()
        self._thread = Thread(target=self._watch, name="long tests", daemon=True)

    def pytest_sessionstart(self) -> None:
        """Start to watch."""
        self._thread.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note when a test starts."""
        self._starts[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Forget a test that has ended."""
        self._starts.pop(nodeid, None)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str) -> None:
        """Forget a test that ended its process."""
        self._print_line(f"\n{crashitem} ended its process")
        self._starts.pop(crashitem, None)

    def pytest_unconfigure(self) -> None:
        """Stop to watch."""
        self._ended.set()

    def _print_line(self, line: str) -> None:
        writer = self._config.get_terminal_writer()
        writer.line(line)
        writer.flush()

    def _watch(self) -> None:
        while not self._ended.wait(self._interval_s):
            now = time.monotonic()
            for nodeid, start in sorted(self._starts.items()):
                if now - start >= self._interval_s:
                    self._print_line(f"\n{nodeid} has run for {now - start:.0f} s")
