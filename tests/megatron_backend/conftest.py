"""What the Megatron trainer's tests import: their helpers, and the reference that the other trainer is compared with."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "fsdp2_backend"):  # imported here, by loss paths and by spawned workers
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.fixture(scope="session", autouse=True)
def quick_garbage_collection() -> Iterator[None]:
    """Closing a trainer collects garbage; what torch and Megatron hold need not be looked through each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
