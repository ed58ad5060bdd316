"""The process that distributes tests: it names those that take long, and goes on where one ends its process."""

import time
from threading import Event, Thread
from typing import Any

import pytest

INTERVAL_S = 300.0
"""Seconds after which a test is named, and named again."""


class Runner:
    """Prints tests that started `interval_s` seconds ago and have not ended, once in each interval: where someone ends the run
    from outside, nothing else names them."""

    def __init__(self, config: pytest.Config, interval_s: float = INTERVAL_S) -> None:
        self._config, self._interval_s = config, interval_s
        self._starts: dict[str, float] = {}
        self._ended = Event()
        self._thread = Thread(target=self._watch, name="tests that take long", daemon=True)

    def pytest_sessionstart(self) -> None:
        """Start to watch."""
        self._thread.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note when a test starts."""
        self._starts[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Forget a test that has ended."""
        self._starts.pop(nodeid, None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Forget a test that ended its process."""
        if report.when == "???":  # pytest-xdist's own report
            self._print_line(f"\n{report.nodeid} ended its process")
            self._starts.pop(report.nodeid, None)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Distribute by file, also where a test ends its process."""
        if config.getoption("dist") != "loadfile":
            return None
        from xdist.scheduler import LoadFileScheduling

        class Scheduling(LoadFileScheduling):
            def remove_node(self, node: Any) -> str | None:
                """Return the test that ended the process, None where all had run. It runs no second time: pytest-xdist would
                run it for ever. Files whose tests have all run are left out, for whose results it would wait."""
                files = self.assigned_work[node]
                ended = next((test for tests in files.values() for test, done in tests.items() if not done), None)
                for name, tests in list(files.items()):
                    if ended in tests:
                        tests[ended] = True
                    if all(tests.values()):
                        del files[name]
                super().remove_node(node)
                return ended

            def schedule(self) -> None:
                """Give each process two files, or tell it that no more come: with one test alone it would wait for another."""
                super().schedule()
                for node in self.nodes:
                    self._reschedule(node)

        return Scheduling(config, log)

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
