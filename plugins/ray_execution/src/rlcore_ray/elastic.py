"""Engines that join a run and leave it: each in a process of its own, wherever the cluster has room for it."""

import math
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

from attrs import define, evolve, field, frozen

from rlcore.execution import BackendArguments, ChosenPlugins, first_line
from rlcore.spi import ConfigError, DraftCounts, ExecutionProgress, Problem, RankInfo, WorkerError
from rlcore.spi.execution import RefitCommand
from rlcore_ray.calls import Calls, Rank
from rlcore_ray.commands import GeneratorCommand, WorkerEnv
from rlcore_ray.config import RayConfig
from rlcore_ray.engines import ANSWER_S, Engines
from rlcore_ray.failures import WorkerInfo
from rlcore_ray.nodes import require_same
from rlcore_ray.published_weights import PublishedWeights
from rlcore_ray.quiet_progress import QuietProgress

LOOK_S = 2.0
"""Seconds between two looks at an engine that nobody calls."""
LEAST_WAIT_S = 60.0
"""Seconds that engines get at least to be placed and to start, where a recipe needs some."""
AGAIN_S, LONGEST_AGAIN_S = 1.0, 300.0
"""Seconds before a process starts where one has ended; twice as many after each that has not taken part."""
JOIN_S = 2.0
"""Most seconds for the thread of a slot to end with the run."""

StartEngine: TypeAlias = Callable[[int], Rank]
"""Starts the process of a slot, which Ray places once a node has room."""


@frozen(kw_only=True, eq=False)
class EngineSetup:
    """The parts of every engine that joins."""

    arguments: BackendArguments
    plugins: ChosenPlugins
    decoder: bytes
    """Pickled: a TextDecoder."""
    surroundings: WorkerEnv
    """The process around an engine, but for its devices."""
    logs: Path
    """A folder that all nodes share."""

    def order(self, slot: int, cluster: RayConfig) -> GeneratorCommand:
        """Return the arguments of the engine of a slot."""
        arguments, elastic = self.arguments.generator, cluster.elastic
        assert arguments is not None
        assert elastic is not None
        device = self.arguments.device
        context = evolve(
            arguments.context,
            rank_info=RankInfo(rank=slot, world_size=slot + 1, local_rank=0, device=device, rendezvous=None),
            channel=engine_channel(arguments.context.channel),
            delta="off",
            devices=tuple(range(elastic.gpus)) if device == "cuda" else None,
            log_directory=self.logs / f"engine-{slot}",
        )
        return GeneratorCommand(arguments=evolve(arguments, context=context), decoder=self.decoder)


def engine_channel(channel: str | None) -> str:
    """Return the channel from an engine's process to what holds its weights, by the run's."""
    return "in_process" if channel == "in_process" else "directory"


@define(eq=False)
class ElasticEngines:
    """Keeps an engine in each slot, as far as nodes have room, brings them weights, and takes out those that leave.

    A thread for each slot starts its process, waits for it to be placed, and starts another one once it has ended.
    """

    engines: Engines
    cluster: RayConfig
    setup: EngineSetup
    start: StartEngine
    progress: ExecutionProgress
    _changed: threading.Condition = field(factory=threading.Condition, init=False)
    _arrived: set[int] = field(factory=set, init=False)
    """Slots whose processes have been placed."""
    _ready: dict[int, Calls] = field(factory=dict, init=False)
    """Slots whose engines hold weights."""
    _pending: dict[int, Calls] = field(factory=dict, init=False)
    """The processes of all slots, placed or not."""
    _refits: threading.Lock = field(factory=threading.Lock, init=False)
    """Held while engines change their weights together, and while one that has read weights joins."""
    _current: tuple[RefitCommand, PublishedWeights] | None = field(default=None, init=False)
    _is_closed: threading.Event = field(factory=threading.Event, init=False)
    _shown: set[tuple[str, str]] = field(factory=set, init=False)
    """The nodes and causes of failures that a warning has named."""
    _threads: list[threading.Thread] = field(factory=list, init=False)

    def open(self) -> None:
        """Start a process in each slot. ConfigError where fewer than `min` are placed within `cluster.wait_s`."""
        for slot in self.engines.slots:
            self._threads.append(threading.Thread(target=self._keep, args=(slot,), name=f"engine-{slot}", daemon=True))
            self._threads[-1].start()
        if not self._wait_for_least():
            raise ConfigError([self._too_few()])

    @property
    def workers(self) -> list[WorkerInfo]:
        """The processes that run now or did last."""
        with self._changed:
            return [calls.workers[0] for calls in self._pending.values()]

    def close(self) -> None:
        """Let all engines free what they hold, and end them."""
        self._is_closed.set()
        with self._changed:
            ready = list(self._ready.values())
        if ready:
            with ThreadPoolExecutor(len(ready)) as pool:
                list(pool.map(Calls.close, ready))
        self.kill()

    def kill(self) -> None:
        """End the processes of all engines."""
        self._is_closed.set()
        with self._changed:
            pending = list(self._pending.values())
            self._changed.notify_all()
        for calls in pending:
            calls.kill()
        for thread in self._threads:
            thread.join(JOIN_S)  # or its next call would start Ray again

    def refit(self, order: RefitCommand, weights: PublishedWeights | str | None) -> list[DraftCounts]:
        """Bring the weights to all engines that take part; one that fails is out. Without weights all are out, with the reason
        that stands in their place. Their draft counts. WorkerError where fewer than `min` are there, also after
        `cluster.wait_s`."""
        if not self._wait_for_least():
            raise WorkerError(f"refit: {self._too_few()}")
        with self._refits:
            ready = dict(self._ready)
            if not isinstance(weights, PublishedWeights):
                self._current = None
                for slot, calls in ready.items():
                    self._lose(slot, calls, WorkerError(f"the weights are not in Ray's store: {weights}"))
                return []
            self._current = order, weights
            if not ready:
                return []
            with ThreadPoolExecutor(len(ready)) as pool:
                found = list(pool.map(lambda slot: self._refit(slot, ready[slot], order, weights), ready))
        return [drafts for drafts in found if drafts is not None]

    @property
    def _patience_s(self) -> float:
        return max(LEAST_WAIT_S, self.cluster.wait_s)

    def _wait_for_least(self) -> bool:
        assert self.cluster.elastic is not None
        least = self.cluster.elastic.min
        with self._changed:
            return self._changed.wait_for(lambda: len(self._arrived) >= least or self._is_closed.is_set(), self._patience_s)

    def _too_few(self) -> Problem:
        assert self.cluster.elastic is not None
        kind = "GPU" if self.setup.arguments.device == "cuda" else "CPU"
        return Problem(
            path="cluster.elastic.min",
            found=f"{len(self._arrived)} engine(s) that a node has room for, after {self._patience_s:g} s",
            expected=f"at least {self.cluster.elastic.min}, each with {self.cluster.elastic.gpus} {kind}(s)",
            remedy="Add nodes, lower cluster.elastic.min, or set cluster.wait_s to wait for nodes.",
        )

    def _refit(self, slot: int, calls: Calls, order: RefitCommand, weights: PublishedWeights) -> DraftCounts | None:
        """Refit one engine of those that take part. One that fails, in whatever way, is out: the others have the weights."""
        try:
            drafts = _bring(calls, order, weights, self.cluster.straggler_timeout_s)
            self.engines.join(slot, calls, weights.weight_version)
        except BaseException as error:
            self._lose(slot, calls, error)
            return None
        return drafts

    def _keep(self, slot: int) -> None:
        pause_s = AGAIN_S
        while not self._is_closed.is_set():
            calls: Calls | None = None
            try:
                calls = self._calls_of(slot)
                self._prepare(slot, calls)
                self._join(slot, calls)
                pause_s = AGAIN_S
                while not self._is_closed.wait(LOOK_S):
                    calls.beside("stream_standby", {0: ()}, limit_s=ANSWER_S)
                    if calls.workers[0].node_id in _draining():
                        self._drain(slot, calls)
            except BaseException as error:  # nobody sees what a thread raises
                if calls is not None:
                    self._lose(slot, calls, error)
            self._is_closed.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_AGAIN_S)

    def _drain(self, slot: int, calls: Calls) -> None:
        """Let an engine finish its samples, then raise WorkerError."""
        with self._refits:
            self._ready.pop(slot, None)
            self.engines.retire(slot)
        while self.engines.is_busy(slot) and not self._is_closed.wait(LOOK_S):
            calls.beside("stream_standby", {0: ()}, limit_s=ANSWER_S)
        raise WorkerError("its node is drained")

    def _calls_of(self, slot: int) -> Calls:
        calls = Calls(ranks=[self.start(slot)], cluster=self.cluster, progress=QuietProgress(self.progress.note), pool="engine")
        with self._changed:
            self._pending[slot] = calls
        if self._is_closed.is_set():  # `close` may have missed it
            calls.kill()
        return calls

    def _prepare(self, slot: int, calls: Calls) -> None:
        """Have the process load what the driver chose, and build the engine. It may wait for a node as long as the run."""
        (arrival,) = calls.all("arrive", limit_s=math.inf)
        calls.locate([arrival.worker])
        require_same(calls.workers, [arrival.software])
        with self._changed:
            self._arrived.add(slot)
            self._changed.notify_all()
        gpu_ids = arrival.worker.gpu_ids
        around = evolve(self.setup.surroundings, gpu_ids=gpu_ids, rank_gpu_ids=gpu_ids[:1])
        calls.all("prepare", self.setup.plugins, around, limit_s=self.cluster.start_timeout_s)
        order = self.setup.order(slot, self.cluster)
        calls.all("build_generator", order, limit_s=self.cluster.start_timeout_s)

    def _join(self, slot: int, calls: Calls) -> None:
        """Bring the engine to the present weights, and have it take part. One that these have changed for meanwhile takes part
        from the next refit on."""
        with self._refits:
            current = self._current
        if current is not None:
            _bring(calls, *current, self.cluster.start_timeout_s)  # beside the run
        with self._refits:
            self._ready[slot] = calls
            if current is not None and self._current is current:
                self.engines.join(slot, calls, current[1].weight_version)

    def _lose(self, slot: int, calls: Calls, error: BaseException) -> None:
        """End an engine that has failed or left; the first to notice does it."""
        with self._changed:
            if self._pending.get(slot) is not calls:
                return
            del self._pending[slot]
            self._arrived.discard(slot)
            self._ready.pop(slot, None)
        calls.kill()
        if self._is_closed.is_set():
            return
        self.engines.leave(slot, calls)
        worker, cause = calls.workers[0], first_line(error).rstrip(".")
        if (worker.node, cause) not in self._shown:  # a node with other software stays as it is
            self._shown.add((worker.node, cause))
            self.progress.note(f"{worker} is out of the run: {cause}. Another starts once a node has room")


def _draining() -> Collection[str]:
    """Return the nodes that are about to go, by Ray's autoscaler or `ray drain-node`; none where this Ray names none."""
    try:
        from ray._private.state import state  # as Ray Train looks for them

        found: dict[str, int] = state.get_draining_nodes()
    except (ImportError, AttributeError):
        return ()
    return found


def _bring(calls: Calls, order: RefitCommand, weights: PublishedWeights, limit_s: float) -> DraftCounts | None:
    """Refit one engine within so many seconds; the counts of its drafts since the refit before."""
    channel = engine_channel(order.channel)
    own = evolve(order, channel=channel, may_alias=False, delta="off", not_awaited=frozenset())
    drafts: DraftCounts | None = calls.apart("refit_published", {0: (own, weights)}, limit_s=limit_s)[0]
    return drafts
