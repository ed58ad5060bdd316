"""Python's search for reference cycles, kept from objects that have none."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEVER = 2**30


@contextmanager
def only_young_collections() -> Iterator[None]:
    """Search new objects alone. By itself Python looks through all there are whenever a quarter has been added: a quarter of
    the driver's time, where a step's samples are a million objects that are all in use."""
    young, middle, full = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, full)
