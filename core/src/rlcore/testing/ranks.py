"""Ranks in processes of their own, forked from one that has imported what they need."""

import socket
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

PRELOADED: list[str] = ["torch", "rlcore.testing.conformance.rank_script"]
"""Modules that the server imports from which ranks are forked; those that cannot be found there are left out. It starts with
the first launch of a process, so that what is added later comes too late."""


def launch(
    function: Callable[..., None], arguments: tuple[Any, ...], num_ranks: int, *, timeout_s: float | None = None
) -> None:
    """Call `function(rank, *arguments)` on each rank. What one raises ends the others, and is raised here.

    TimeoutError where one has not ended after `timeout_s`; all are killed then.
    """
    multiprocessing: Any = import_module("torch.multiprocessing")
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))
    ranks = multiprocessing.start_processes(function, arguments, nprocs=num_ranks, join=False, start_method="forkserver")
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while not ranks.join(None if deadline is None else max(deadline - time.monotonic(), 0.01)):
        if deadline is None or time.monotonic() < deadline:
            continue
        for process in ranks.processes:
            process.kill()
            process.join()
        raise TimeoutError(f"the ranks have not ended after {timeout_s:g} s; one may wait for another that made no such call")


def free_address() -> str:
    """An address at which ranks of this machine can meet: tcp://host:port."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{held.getsockname()[1]}"
