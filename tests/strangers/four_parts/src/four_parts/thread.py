"""The execution "thread": trainer and generator live in one thread, which makes every call."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from attrs import evolve

from rlcore.execution import open_backends


class InThread:
    """A group of which every method runs in the thread."""

    def __init__(self, group, thread):
        self._group, self._thread = group, thread

    def __getattr__(self, name):
        found = getattr(self._group, name)
        return (lambda *args, **named: self._thread.submit(found, *args, **named).result()) if callable(found) else found


@contextmanager
def in_thread(context, config):
    """Start the thread for a whole run, and build the backends in it each time that the core asks for them."""
    plugins = context.plugins.load_here()
    with ThreadPoolExecutor(1, thread_name_prefix="four-parts") as thread:

        @contextmanager
        def opened():
            building = open_backends(context.arguments, plugins)
            backends = thread.submit(building.__enter__).result()
            roles = ("trainer", "generator", "route", "critic", "reference")
            groups = {role: group and InThread(group, thread) for role in roles for group in [getattr(backends, role)]}
            try:
                yield evolve(backends, **groups)
            finally:
                thread.submit(building.__exit__, None, None, None).result()

        yield opened
