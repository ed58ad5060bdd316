"""Python's search for reference cycles, kept from objects that have none."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

NEVER = 2**30
MANY = 2**14
"""Samples of a step whose search takes long."""
SHARE = 0.001
"""The share of time that searches of all objects between steps may take."""
next_search_at = 0.0
"""When the next such search may begin, in seconds of the monotonic clock."""
_is_frozen = False
"""Python's own count of frozen objects goes through all of them."""


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


def step_begins(num_samples: int) -> None:
    """Search none of the present objects until `step_ends`: a step's samples are in use until it was trained on, and what is
    made meanwhile is searched all the same. Where they are few nothing is gained, and backends of this very process search for
    cycles that hold a device's memory, also in what was there before."""
    global _is_frozen
    if num_samples < MANY:
        return
    gc.freeze()
    _is_frozen = True


def step_ends() -> None:
    """Search all objects again; those that were frozen at once, where that was not done for long, since no search of the
    next step will see them. May be called again."""
    global next_search_at, _is_frozen
    if not _is_frozen:
        return
    gc.unfreeze()
    _is_frozen = False
    if (start := time.monotonic()) >= next_search_at:
        gc.collect()
        end = time.monotonic()
        next_search_at = end + (end - start) / SHARE
