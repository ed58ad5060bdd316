"""What tests take for granted of the process that runs them."""

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

# How long an example takes is the machine's business: a busy one would fail what is right.
settings.register_profile("rlcore", deadline=None)
settings.load_profile("rlcore")
# TransformerEngine's products of float32 round to TF32 otherwise. Read when CUDA's libraries are loaded, here or in workers.
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
# A shell without job control has what it starts in the background ignore Ctrl-C, and everything that this starts too.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def quick_garbage_collection() -> Iterator[None]:
    """Closing a trainer or an engine collects garbage; what has been loaded by now need not be looked through each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
