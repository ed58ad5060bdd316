"""The stacks of ranks that give no answer, read on their own machines."""

import time
from collections.abc import Sequence
from typing import Any

from rlcore_ray.failures import WorkerInfo
from rlcore_workers.logged_process import append_lines
from rlcore_workers.stacks import beginning_of, stacks_of

MAX_RANKS = 4
"""Most ranks whose stacks are read: where one hangs, others often wait for it."""
LIMIT_S = 90.0
"""Most seconds for the machines to read them."""


def stacks_of_ranks(workers: Sequence[WorkerInfo]) -> str:
    """Write the stacks of the first ranks, and of their engines, to the logs of these; return the beginning of each."""
    import ray

    reading = {_begin(worker): worker for worker in workers[:MAX_RANKS] if worker.node_id}
    if not reading:
        return ""
    ready, _ = ray.wait(list(reading), num_returns=len(reading), timeout=LIMIT_S)
    shown = []
    for reference, worker in reading.items():
        try:
            stacks = ray.get(reference) if reference in ready else f"Its machine read no stack within {LIMIT_S:g} s"
        except ray.exceptions.RayError as error:
            stacks = f"Its machine read no stack: {error}"
        append_lines(worker.log_file, f"=== {time.strftime('%Y-%m-%d %H:%M:%S')} {worker}\n{stacks}")
        shown.append(f"{worker}: {beginning_of(stacks)}")
    return "\n".join(shown)


def _begin(worker: WorkerInfo) -> Any:
    """Begin to read on the worker's machine: another user's or container's processes cannot be seen from here."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    place = NodeAffinitySchedulingStrategy(worker.node_id, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0)(stacks_of)
    return task.options(scheduling_strategy=place).remote(worker.pid)
