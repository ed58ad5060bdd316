"""Ranks in processes of their own. Without a GPU they are forked from one that has imported what they need."""

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import forkserver
from typing import Any

from rlcore.gpu import has_gpu

PRELOADED: list[str] = ["torch"]
"""Modules that the server imports from which ranks are forked; those that cannot be found there are left out. It starts with
the first launch of a process, so that what is added later comes too late."""


def launch(
    function: Callable[..., None], arguments: tuple[Any, ...], num_ranks: int, *, timeout_s: float | None = None
) -> None:
    """Call `function(rank, *arguments)` on each rank. What one raises ends the others, and is raised here.

    TimeoutError where one has not ended after `timeout_s`. No rank outlives the call, whatever ends it.
    """
    start_method = _start_method()
    if start_method == "forkserver":
        _start_server()
    torch: Any = import_module("torch.multiprocessing")
    ranks = torch.start_processes(function, arguments, nprocs=num_ranks, join=False, start_method=start_method)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        while not ranks.join(None if deadline is None else max(deadline - time.monotonic(), 0.01)):
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(
                    f"the ranks have not ended after {timeout_s:g} s; one may wait for another that made no such call"
                )
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()


def _start_method() -> str:
    """Some of PRELOADED initialise CUDA while they are imported, which no process forked afterwards can use."""
    return "spawn" if has_gpu() else "forkserver"


def _start_server() -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))
    with _importing_as_here():
        forkserver.ensure_running()


@contextmanager
def _importing_as_here() -> Iterator[None]:
    """Python 3.11 starts the server without this process's sys.path, so that it would find none of the tests' own modules."""
    kept = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        yield
    finally:
        if kept is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = kept


def free_address() -> str:
    """An address at which ranks of this machine can meet: tcp://host:port. Another process may take the port before they do."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{held.getsockname()[1]}"
