"""Trainer and generator in one worker thread."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from attrs import evolve

from rlcore.execution import open_backends


class InThread:
    """A trainer, a generator or a refit route whose methods run in a thread."""

    def __init__(self, group, thread):
        self._group, self._thread = group, thread

    def __getattr__(self, name):
        found = getattr(self._group, name)
        if not callable(found):
            return found
        return lambda *arguments, **named: self._thread.submit(found, *arguments, **named).result()


class NewPlugin:
    """Keep one thread for the whole run."""

    def __init__(self, context, config):
        self._arguments, self._plugins = context.arguments, context.plugins.load_here()
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self):
        return self.opened

    def __exit__(self, *error):
        self._thread.shutdown()

    @contextmanager
    def opened(self) -> Iterator:
        """Build the backends in the thread, and close them there. The core calls this again after a failure."""
        building = open_backends(self._arguments, self._plugins)
        backends = self._thread.submit(building.__enter__).result()
        names = ("trainer", "critic", "generator", "route")
        groups = {name: InThread(group, self._thread) for name in names if (group := getattr(backends, name))}
        try:
            yield evolve(backends, **groups)
        finally:
            self._thread.submit(building.__exit__, None, None, None).result()
