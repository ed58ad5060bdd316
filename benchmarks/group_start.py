"""What gloo's groups cost when they are made: traffic of torch's store, sockets and CPU seconds, by the number of ranks.

    .venv/bin/python benchmarks/group_start.py
    .venv/bin/python benchmarks/group_start.py --ranks 256 1024 --kinds lazy    # eager ones would open 65,536 sockets and more

Each rank is a thread with a context of gloo's own, and all of them are in one process. They meet in a store that counts its
calls and bytes, as the ranks of a run meet in torch's TCPStore on rank 0. Then each takes part in an all-reduce. Eager groups
exchange addresses for every pair and connect every pair; lazy ones (TORCH_GLOO_LAZY_INIT), ours from 256 ranks on,
connect a pair when it is used. Each row runs in a process of its own. Bytes are of values alone.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

from rlcore_torchkit.distributed.process_group import LAZY_GLOO, keep_on_loopback

TIMEOUT = timedelta(seconds=300)
KINDS = {"eager": "0", "lazy": "1"}
HEADS = ("ranks", "groups", "gets", "store MiB", "sockets", "CPU s", "of the first all-reduce")


class CountingStore(dist.Store):
    """A store in this process that counts."""

    def __init__(self) -> None:
        super().__init__()
        self._inner = dist.HashStore()
        self._lock = threading.Lock()
        self.gets = self.num_bytes = 0

    def _count(self, gets: int, num_bytes: int) -> None:
        with self._lock:
            self.gets, self.num_bytes = self.gets + gets, self.num_bytes + num_bytes

    def set(self, key: str, value: Any) -> None:
        self._count(0, len(value))
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._inner.get(key)
        self._count(1, len(value))
        return value

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._inner.wait(keys, *timeout)


def seconds_of(call: Callable[[int], None], num_ranks: int) -> float:
    """CPU seconds of all ranks together, each in a thread."""
    start = time.process_time()
    with ThreadPoolExecutor(num_ranks) as threads:
        list(threads.map(call, range(num_ranks)))
    return time.process_time() - start


def measure(num_ranks: int) -> tuple[int, float, int, float, float]:
    """Gets, MiB through the store, sockets, and CPU seconds of making the groups and of the first collective."""
    keep_on_loopback()
    torch.set_num_threads(1)
    store, groups, open_before = CountingStore(), dict[int, ProcessGroupGloo](), num_open()

    def make(rank: int) -> None:
        groups[rank] = ProcessGroupGloo(store, rank, num_ranks, TIMEOUT)

    def reduce(rank: int) -> None:
        found = torch.ones(4)
        groups[rank].allreduce([found]).wait()
        assert found.tolist() == [num_ranks] * 4

    making = seconds_of(make, num_ranks)
    reducing = seconds_of(reduce, num_ranks)
    return store.gets, store.num_bytes / 2**20, num_open() - open_before, making, reducing


def num_open() -> int:
    return sum(
        os.readlink(f"/proc/self/fd/{name}").startswith("socket") for name in os.listdir("/proc/self/fd") if exists(name)
    )


def exists(name: str) -> bool:
    return Path(f"/proc/self/fd/{name}").is_symlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--quick", action="store_true", help="four ranks, to try the script")
    parser.add_argument("--row", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.ranks = [4]
    if arguments.row:
        gets, mib, sockets, making, reducing = measure(arguments.ranks[0])
        print(f"| {gets:,} | {mib:,.3f} | {sockets:,} | {making:.2f} | {reducing:.2f} |")
        return
    print("| " + " | ".join(HEADS) + " |\n" + "|---" * len(HEADS) + "|")
    for num_ranks in arguments.ranks:
        for kind in arguments.kinds:
            own = [sys.executable, __file__, "--row", "--ranks", str(num_ranks)]
            row = subprocess.check_output(own, text=True, env=os.environ | {LAZY_GLOO: KINDS[kind]})
            print(f"| {num_ranks} | {kind} {row.strip()}")


if __name__ == "__main__":
    main()
