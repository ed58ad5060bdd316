"""Closing a backend at the end, without hiding the error that led there."""

from collections.abc import Iterator
from contextlib import contextmanager

from rlcore.registry.handle import BackendHandle
from rlcore.registry.plugin_errors import described


@contextmanager
def closed_after(handle: BackendHandle) -> Iterator[None]:
    """Close the backend whatever happens. Where something had failed before, a failing close is a note on that."""
    try:
        yield
    except BaseException as error:
        try:
            handle.close()
        except Exception as failure:
            error.add_note(f"{handle.entry.label} then failed in close too: {described(failure)}")
        raise
    handle.close()
