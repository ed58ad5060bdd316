"""The driver's and a rank's work that grows with the number of ranks, from 64 to 4,096 simulated ones.

    .venv/bin/python benchmarks/world_size.py
    .venv/bin/python benchmarks/world_size.py --ranks 64 256

Each row is the CPU seconds or the bytes of the real code, given as many ranks of 8 a node as the column says, and the exponent
b of a * ranks^b that fits its columns best. With exponent 1 the cost of a rank stays the same. The last column is what the fit
gives for 10,000 ranks.

start-up: the driver finds each rank's surroundings, compares software and clocks, and pickles what each rank loads.
store: the operations on torch's store by which gloo's ranks find each other; up to 64 ranks, which are threads.
step: 8 sequences a rank are divided among ranks and packed, and their log-probabilities joined.
objects: the objects in Ray's store that hand a step to the ranks, one a node, at their measured cost.
refit: one rank plans the transfers of a refit by shards of 16 matrices, fully sharded, to engines of 8 ranks each.
checkpoint: a manifest over a file of 4 KiB for each rank is written, and all are checked again.
"""

import argparse
import math
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlcore.run.report.progress import Progress
from rlcore.run.storage.checkpoint import LoopState, begin_checkpoint, find_damage
from rlcore.spi import TensorSpec, TokenBatch
from rlcore.spi.weights import ShardSlice
from rlcore_ray.commands import Arrival, Software
from rlcore_ray.config import RayConfig
from rlcore_ray.dispatch import Dispatch
from rlcore_ray.failures import WorkerInfo
from rlcore_ray.nodes import note_clocks, require_same
from rlcore_ray.pool import surroundings_of
from rlcore_ray.session import ray_session
from rlcore_torchkit.refit.shard_route import plan_windows

PER_NODE = 8
SEQUENCES_PER_RANK = 8
LENGTH = 256
MATRICES, ROWS, COLUMNS = 16, 65_536, 64
MAX_BYTES = 2**26
STORE_RANKS = (8, 16, 32, 64)
PLANNED_RANKS = 10_000


def workers_of(num_ranks: int) -> list[WorkerInfo]:
    """Ranks of nodes with PER_NODE devices each."""
    return [
        WorkerInfo(
            rank=rank,
            node=f"10.0.{rank // PER_NODE // 256}.{rank // PER_NODE % 256}",
            node_id=f"{rank // PER_NODE:056x}",
            pid=1000 + rank,
            log_file=Path(f"rank-{rank}.log"),
            gpu_ids=(str(rank % PER_NODE),),
        )
        for rank in range(num_ranks)
    ]


def cpu_s(work: Callable[[], object]) -> float:
    """CPU seconds of this process for some work."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def start_up(num_ranks: int) -> tuple[float, float]:
    """CPU seconds of the driver, and the bytes that it pickles."""
    import ray

    workers, software, now = workers_of(num_ranks), Software.here(), time.time()
    cluster, sent = RayConfig(nodes=num_ranks // PER_NODE, gpus_per_node=PER_NODE, address="auto"), Counter[str]()

    def work() -> None:
        require_same(workers, [software] * num_ranks)
        note_clocks([Arrival(worker=one, software=software, clock=now) for one in workers], now, now, Progress())
        sent["bytes"] = sum(len(ray.cloudpickle.dumps(one)) for one in surroundings_of(workers, cluster, "a" * 32))

    return cpu_s(work), sent["bytes"]


class CountingStore(dist.Store):
    """Counts the operations of one rank on a store that all share."""

    def __init__(self, shared: Any, counts: Counter[str]) -> None:
        super().__init__()
        self.shared, self.counts = shared, counts

    def set(self, key: str, value: Any) -> None:
        """See torch.distributed.Store."""
        self.counts["set"] += 1
        self.shared.set(key, value)

    def get(self, key: str) -> Any:
        """See torch.distributed.Store."""
        self.counts["get"] += 1
        return self.shared.get(key)

    def add(self, key: str, amount: int) -> Any:
        """See torch.distributed.Store."""
        self.counts["add"] += 1
        return self.shared.add(key, amount)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """See torch.distributed.Store."""
        self.counts["wait"] += 1
        self.shared.wait(list(keys), *([] if timeout is None else [timeout]))


def store_operations(num_ranks: int) -> float:
    """Operations of all ranks of one group, which connect two ranks at their first exchange, until a barrier is through."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    shared, counts = dist.HashStore(), [Counter[str]() for _ in range(num_ranks)]
    stores = [CountingStore(shared, own) for own in counts]  # the group alone would not keep what Python adds to them

    def rank_in_group(rank: int) -> None:
        group = dist.ProcessGroupGloo(stores[rank], rank, num_ranks, timedelta(seconds=120))
        group.barrier().wait()

    threads = [threading.Thread(target=rank_in_group, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(sum(own.values()) for own in counts)


def step(num_ranks: int) -> float:
    """CPU seconds of the driver to divide a step, and to join one column."""
    number = SEQUENCES_PER_RANK * num_ranks
    lengths = np.random.default_rng(0).integers(LENGTH // 2, LENGTH, number)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    size = int(offsets[-1])
    batch = TokenBatch(
        tokens=np.zeros(size, np.int32),
        offsets=offsets,
        loss_mask=np.arange(size) != np.repeat(offsets[:-1], lengths),
        token_columns={"advantages": np.zeros(size, np.float32)},
    )

    def work() -> None:
        dispatch = Dispatch.of(batch, np.arange(number), num_ranks, 4 * LENGTH)
        parts = dispatch.parts(batch)
        dispatch.join(batch, [np.zeros(len(part.tokens), np.float32) for part in parts])

    return cpu_s(work)


def objects(num_ranks: int) -> float:
    """CPU seconds of the driver to put one object a node into Ray's store."""
    import ray

    part = [np.zeros(SEQUENCES_PER_RANK * LENGTH, np.float32)] * PER_NODE
    return cpu_s(lambda: [ray.put(part) for _ in range(num_ranks // PER_NODE)])


def refit(num_ranks: int) -> float:
    """CPU seconds of one rank to plan a refit."""
    specs = [TensorSpec(name=f"layers.{number}", shape=(ROWS, COLUMNS), dtype="bfloat16") for number in range(MATRICES)]

    def layout(ranks: int, shares: int) -> list[tuple[ShardSlice, ...]]:
        bounds = [ROWS * share // shares for share in range(shares + 1)]
        parts = [
            tuple(ShardSlice(spec.name, (bounds[share], 0), (bounds[share + 1], COLUMNS)) for spec in specs)
            for share in range(shares)
        ]
        return [parts[rank % shares] for rank in range(ranks)]

    held, wanted = layout(num_ranks, num_ranks), layout(num_ranks, PER_NODE)
    return cpu_s(lambda: plan_windows(specs, held, wanted, MAX_BYTES))


def checkpoint(num_ranks: int) -> float:
    """CPU seconds of the driver to name and to check a checkpoint with a file of each rank."""
    state = LoopState(step=1, weight_version=1, model="", reference=None, trainer="none")

    def write(folder: Path) -> None:
        for rank in range(num_ranks):
            (folder / f"__{rank}_0.distcp").write_bytes(bytes(4096))

    with tempfile.TemporaryDirectory() as root:
        complete = begin_checkpoint(Path(root), state, write, keep=None)

        def work() -> None:
            assert find_damage(complete()) is None

        return cpu_s(work)


def fit(sizes: Sequence[int], found: Sequence[float]) -> tuple[float, float]:
    """The exponent of the power law that fits best, and its value for PLANNED_RANKS."""
    exponent, constant = np.polyfit(np.log(sizes), np.log(np.maximum(found, 1e-9)), 1)
    return float(exponent), math.exp(constant) * PLANNED_RANKS**exponent


def show(name: str, sizes: Sequence[int], measure: Callable[[int], float], form: str) -> None:
    """Print one row: the least of three measurements of each size."""
    found = [min(measure(size) for _ in range(3)) for size in sizes]
    exponent, planned = fit(sizes, found)
    cells = "".join(f"{format(value, form):>13}" for value in found)
    print(f"{name:32}{cells}{exponent:>10.2f}{format(planned, form):>15}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024, 4096])
    sizes = sorted(parser.parse_args().ranks)
    torch.set_num_threads(1)
    print(f"{'':32}" + "".join(f"{f'{size:,}':>13}" for size in sizes) + f"{'exponent':>10}{f'{PLANNED_RANKS:,}':>15}")
    show("start-up, driver, CPU s", sizes, lambda size: start_up(size)[0], ".4f")
    show("start-up, bytes", sizes, lambda size: start_up(size)[1], ",.0f")
    show("step, driver, CPU s", sizes, step, ".4f")
    with ray_session(RayConfig(gpus_per_node=1, object_store_mib=500), "cpu", None):
        show("objects, driver, CPU s", sizes, objects, ".4f")
    show("refit, one rank, CPU s", sizes, refit, ".4f")
    show("checkpoint, driver, CPU s", sizes, checkpoint, ".4f")
    print(f"\n{'':32}" + "".join(f"{size:>13}" for size in STORE_RANKS) + f"{'exponent':>10}{f'{PLANNED_RANKS:,}':>15}")
    show("store, operations of a group", STORE_RANKS, store_operations, ",.0f")


if __name__ == "__main__":
    main()
