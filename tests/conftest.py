"""What tests take for granted of the process that runs them."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes is the machine's business: a busy one would fail what is right.
settings.register_profile("rlcore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rlcore")
# TransformerEngine's products of float32 round to TF32 otherwise. Read when CUDA's libraries are loaded, here or in workers.
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
# A shell without job control has what it starts in the background ignore Ctrl-C, and everything that this starts too.
signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = (
    "system",
    "oracle",
    "vllm_generation",
    "conformance",
    "core/run/execution/ray",
    "mutants",
    "fsdp2_backend",
    "megatron_backend",
)
"""Folders whose files take up to minutes each."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: one that is started last would keep a single process busy at the end."""
    folders = [Path(__file__).parent / folder for folder in LONGEST]

    @cache
    def place(file: Path) -> int:
        return next((number for number, folder in enumerate(folders) if file.is_relative_to(folder)), len(folders))

    items.sort(key=lambda item: place(item.path))


@pytest.fixture
def count_calls() -> Callable[[Callable[[], object]], int]:
    """A function that calls another and returns how many calls of Python and C functions that made, here and in threads that it
    started: a measure of work that no busy machine changes."""

    def count(function: Callable[[], object]) -> int:
        number = 0

        def add(_frame: object, event: str, _argument: object) -> None:
            nonlocal number
            number += event in ("call", "c_call")

        gc.disable()  # which would call what others left behind
        threading.setprofile(add)
        sys.setprofile(add)
        try:
            function()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            gc.enable()
        return number

    return count


@pytest.fixture(scope="session", autouse=True)
def quick_garbage_collection() -> Iterator[None]:
    """Closing a trainer or an engine collects garbage; what has been loaded by now need not be looked through each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
