"""A process that collects samples beside some of a pool's engines: its stream is of these alone."""

import os
import pickle
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlcore.execution import is_outside
from rlcore.secrets import masked_traceback
from rlcore_ray.calls import Calls
from rlcore_ray.collector_hosts import CollectorOrder, Sent
from rlcore_ray.engines import Engines
from rlcore_ray.failures import RemoteError, Reply
from rlcore_ray.orphan_processes import mark_children
from rlcore_ray.output import redirect_output
from rlcore_ray.pool_groups import PoolGenerator
from rlcore_ray.quiet_progress import QuietProgress


class CollectorActor:
    """Runs in a process that Ray makes. `take` and `collect` carry messages; `rejoin` reaches it beside them."""

    def __init__(self, log_file: Path) -> None:
        self._log_file = log_file
        self._notes: list[str] = []
        """Warnings of its stream, for the driver."""
        self._progress = QuietProgress(self._notes.append)
        self._sent_notes = 0
        self._changing = threading.Lock()
        self._heard: dict[int, int] = {}
        """The number of the last message on each engine, by its rank."""
        self._known_out: set[int] = set()
        """Ranks of which the driver knows that their engines are out."""
        self._endpoint: Any = None
        self._engines: Engines | None = None

    def start(self, order: CollectorOrder) -> Reply:
        """Build the collector; the answer is the process's number."""
        redirect_output(self._log_file)
        try:
            mark_children(order.surroundings.pool)
            if order.surroundings.directory.is_dir():
                os.chdir(order.surroundings.directory)
            os.environ["OMP_NUM_THREADS"] = order.surroundings.num_threads or "1"
            calls = Calls(ranks=order.ranks, cluster=order.cluster, progress=self._progress)
            self._engines = Engines(calls, order.hosts)
            generator = PoolGenerator(
                calls=calls,
                capabilities=order.capabilities,
                engines=self._engines,
                beside=[
                    Calls(ranks=ranks, cluster=order.cluster, progress=self._progress, pool=pool)
                    for pool, ranks in order.beside
                ],
                watches_others=order.number == 0,
            )
            self._endpoint = pickle.loads(order.make)(generator, order.number, order.num_collectors)
        except BaseException as error:
            if is_outside(error):
                raise
            print(masked_traceback(error), file=sys.stderr, flush=True)
            return Reply(error=RemoteError.of(error, self._log_file))
        return Reply(value=os.getpid())

    def take(self, commands: Sequence[Any], out: frozenset[int], number: int) -> None:
        """Hand the collector commands; `out` are ranks of its engines that hold no weights. `number` counts what the driver has
        sent: an engine that has come back since is not out."""
        assert self._engines is not None
        with self._changing:
            out = frozenset(rank for rank in out if self._heard.get(rank, 0) < number)
            self._heard |= dict.fromkeys(out, number)
            for rank in out & {*self._engines.living}:
                self._engines.take_out(rank)
            self._known_out |= out
        self._endpoint.take(commands)

    def collect(self) -> Sent:
        """Return what the collector has sent, once there is something or a second has passed."""
        messages = self._endpoint.collect()
        assert self._engines is not None
        with self._changing:
            failed = {*self._engines.hosts} - {*self._engines.living} - self._known_out
            self._known_out |= failed
        notes, self._sent_notes = self._notes[self._sent_notes :], len(self._notes)
        return Sent(messages=messages, notes=notes, failed=sorted(failed), lost=self._engines.calls.lost)

    def rejoin(self, rank: int, weight_version: int, number: int) -> None:
        """The engine of a rank holds weights again."""
        assert self._engines is not None
        with self._changing:
            if self._heard.get(rank, 0) > number:
                return
            self._heard[rank] = number
        self._engines.refitted([rank], weight_version)
        with self._changing:
            self._known_out.discard(rank)

    def close(self) -> None:
        """End all work, and what it has started."""
        if self._endpoint is not None:
            with suppress(Exception):
                self._endpoint.close()
