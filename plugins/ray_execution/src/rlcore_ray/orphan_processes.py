"""Processes that a pool's workers have started: marked, and ended before others take their place and need their memory."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil

from rlcore.spi import ExecutionProgress
from rlcore_ray.failures import WorkerInfo
from rlcore_workers.descendants import living_threads

MARK = "RLCORE_POOL"
"""The environment variable by which they are known; what they start in turn inherits it."""
END_S = 30.0
"""Most seconds for killed processes to be gone: one that holds much of a device takes some to give it back."""
ARRIVE_S = 30.0
"""Most seconds for Ray to start what looks for them."""
POLL_S = 0.05


def mark_children(pool: str) -> None:
    """Mark what this process starts from now on as the pool's."""
    os.environ[MARK] = pool


def end_everywhere(pool: str, workers: Sequence[WorkerInfo], progress: ExecutionProgress) -> None:
    """Once the workers have been killed, wait on each of their nodes until they and all that they started are gone.

    A node that has left the cluster is passed over; what does not end in time is told.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    end = ray.remote(num_cpus=0, max_retries=0)(end_here)
    asked = {}
    for node in {worker.node_id for worker in workers if worker.node_id}:
        there = [worker for worker in workers if worker.node_id == node]
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        reference = end.options(scheduling_strategy=strategy).remote(pool, [worker.pid for worker in there])
        asked[reference] = there[0].node
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ARRIVE_S + END_S) if asked else ([], [])
    for reference in ready:
        with suppress(ray.exceptions.RayError):
            left = ray.get(reference)
            if left:
                progress.note(f"node {asked[reference]}: processes of the former workers do not end: {', '.join(left)}")


def end_here(pool: str, workers: Sequence[int]) -> list[str]:
    """Kill what the pool's workers started on this node, until that and the workers, given by process id, are gone.

    Returns what is left after END_S, each with its id and command. Ray itself ends the workers.
    """
    deadline = time.monotonic() + END_S
    started = set[Any]()
    while True:
        # The workers first: while one lives it may start more.
        living = [process for process in map(_process, workers) if process is not None]
        # One that is ending shows its environment no more, and may hold its device still.
        started = set(filter(lives, {*started, *marked(MARK, pool)}))
        left = [described(process) for process in (*living, *sorted(started, key=lambda process: process.pid))]
        if not left or time.monotonic() > deadline:
            return left
        for process in started:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(POLL_S)


def marked(variable: str, value: str) -> Iterator[Any]:
    """The processes, as psutil's, that live and have this value in an environment variable."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if lives(process) and _environment(process).get(variable) == value:
                yield process


def lives(process: Any) -> bool:
    """Return whether a process of psutil's runs anything; one that is gone, or a zombie that holds nothing any more, does
    not."""
    with suppress(psutil.Error):
        return bool(process.is_running() and (process.status() != psutil.STATUS_ZOMBIE or living_threads(process.pid)))
    return False


def _environment(process: Any) -> Mapping[str, str]:
    with suppress(psutil.ZombieProcess):
        found: Mapping[str, str] = process.environ()
        return found
    for thread in living_threads(process.pid):  # the main one has ended
        lines = (thread / "environ").read_text(errors="replace").split("\0")
        return dict(line.split("=", 1) for line in lines if "=" in line)
    return {}


def _process(number: int) -> Any | None:
    """The process with this id; None where it does not live."""
    with suppress(psutil.Error):
        process = psutil.Process(number)
        return process if lives(process) else None
    return None


def described(process: Any) -> str:
    """The id and command of a process of psutil's; the id alone where it shows no command."""
    with suppress(psutil.Error):
        return f"{process.pid} ({' '.join(process.cmdline())[:100]})"
    return str(process.pid)
