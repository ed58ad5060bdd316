"""The generator engines of a pool: which of them hold no weights since they failed, and how often each has failed."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from attrs import define, field

from rlcore.execution import first_line
from rlcore.spi import WorkerError
from rlcore.spi.execution import EngineLimitError
from rlcore_ray.calls import Calls, PoolLostError
from rlcore_ray.failures import WorkerInfo
from rlcore_ray.pending_call import Outcome

ANSWER_S = 60.0
"""Most seconds for an engine that joins and leaves to answer what is answered at once."""


class Rejoins(Protocol):
    """A stream that takes hosts back."""

    def rejoin(self, rank: int, weight_version: int) -> None:
        """The engine of a host holds weights again."""


class Stream(Rejoins, Protocol):
    """A stream of all engines."""

    def retire(self, rank: int) -> None:
        """Send a host nothing more."""

    def is_busy(self, rank: int) -> bool:
        """Return whether a host has samples under way."""


@define(eq=False)
class Engines:
    """One engine a host. One that fails is out until the next refit, for which its generator starts it anew."""

    calls: Calls
    hosts: Sequence[int]
    """The ranks with a generator."""
    slots: Sequence[int] = ()
    """Numbers behind those of all ranks, for engines that join and leave: each has a process without a trainer, or none."""
    _joined: dict[int, Calls] = field(factory=dict, init=False)
    """The processes of slots whose engines have held weights."""
    _out: set[int] = field(init=False)
    """Hosts and slots whose engines hold no weights."""
    _failures: dict[int, list[float]] = field(factory=dict, init=False)
    """The times of each host's engine's failures, by time.monotonic."""
    _num_restarts: int = field(default=0, init=False)
    _stream: Stream | None = field(default=None, init=False)
    _followers: list[Rejoins] = field(factory=list, init=False)
    """Collectors in other processes that stream by some of the engines."""
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    @_out.default
    def _none_joined(self) -> set[int]:
        return set(self.slots)

    @property
    def members(self) -> list[int]:
        """The hosts and the slots."""
        return [*self.hosts, *self.slots]

    @property
    def living(self) -> list[int]:
        """The hosts and slots whose engines hold weights."""
        with self._lock:
            return [member for member in self.members if member not in self._out]

    @property
    def are_whole(self) -> bool:
        """Return whether the engines of all hosts hold weights."""
        with self._lock:
            return self._out.isdisjoint(self.hosts)

    @property
    def not_awaited(self) -> frozenset[int]:
        """Hosts that a refit need not wait for, since others hold weights."""
        with self._lock:
            out = self._out.intersection(self.hosts)
            return frozenset() if len(out) == len(self.hosts) else frozenset(out)

    def worker(self, member: int) -> WorkerInfo:
        """Return the process of a host, or of the engine that is or was last in a slot."""
        calls, rank = self._reached(member)
        return calls.workers[rank]

    def join(self, slot: int, calls: Calls, weight_version: int) -> None:
        """Note that the engine in a slot holds weights. Another process than before takes part from now on."""
        with self._lock:
            self._joined[slot], is_new = calls, self._joined.get(slot) is not calls
            self._out |= {slot} if is_new else set()  # also where nobody has noticed that the last one died
        if is_new:
            self.calls.progress.note(f"{calls.workers[0]} takes part from now on")
        self.refitted([slot], weight_version)

    def leave(self, slot: int, calls: Calls) -> None:
        """Note that the process in a slot is gone, unless another has come since."""
        with self._lock:
            if self._joined.get(slot) is calls:
                self._out.add(slot)

    def retire(self, slot: int) -> None:
        """Send the engine in a slot nothing more. What it has under way goes on."""
        self.take_out(slot)
        if (stream := self._stream) is not None:
            stream.retire(slot)

    def is_busy(self, slot: int) -> bool:
        """Return whether the engine in a slot has samples under way."""
        stream = self._stream
        return stream is not None and stream.is_busy(slot)

    def beside(self, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> list[int]:
        """Call `Calls.beside` of hosts and slots, and return those that have answered: a slot's engine that is gone has not."""
        own = {member: given for member, given in arguments.items() if member not in self.slots}
        if own:
            self.calls.beside(name, own)
        answered = [*own]
        for slot in arguments.keys() - own.keys():
            calls, rank = self._reached(slot)
            with suppress(Exception):  # of this engine alone
                calls.beside(name, {rank: arguments[slot]}, limit_s=ANSWER_S)
                answered.append(slot)
        return answered

    def send(self, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> None:
        """Call `Calls.beside` of hosts, and `Calls.post` of slots: a node that is out of reach would keep all others waiting.
        What its engine does not take, the thread that collects its samples sends to the others."""
        for slot in arguments.keys() & {*self.slots}:
            calls, rank = self._reached(slot)
            calls.post(name, rank, *arguments[slot])
        own = {member: given for member, given in arguments.items() if member not in self.slots}
        if own:
            self.calls.beside(name, own)

    def outcome_beside(self, name: str, member: int, group: str) -> Outcome:
        """Call `Calls.outcome_beside` of a host or slot; the death of a slot's process is returned, too."""
        calls, rank = self._reached(member)
        try:
            return calls.outcome_beside(name, rank, group)
        except WorkerError as error:
            if member not in self.slots:
                raise
            return error

    def require_progress(self, name: str, member: int, since: float) -> None:
        """Call `Calls.require_progress` of a host or slot."""
        calls, rank = self._reached(member)
        calls.require_progress(name, rank, since)

    def _reached(self, member: int) -> tuple[Calls, int]:
        if member not in self.slots:
            return self.calls, member
        with self._lock:
            return self._joined[member], 0

    def outlive(self, error: object, member: int | None = None) -> bool:
        """Return whether others may go on after this error of one engine: it died or ran out of memory, and the workers all
        live."""
        if member in self.slots:
            return isinstance(error, Exception) and self.calls.is_usable
        is_failure = isinstance(error, WorkerError | MemoryError) or type(error).__name__ == "OutOfMemoryError"
        may_restart = self.calls.cluster.max_engine_restarts > 0 and self.calls.is_usable
        return is_failure and may_restart and not isinstance(error, PoolLostError)

    def take_out(self, rank: int) -> bool:
        """The engine of a host has failed. Whether there are others."""
        with self._lock:
            self._out.add(rank)
            return len(self._out) < len(self.hosts) + len(self.slots)

    def go_on(self, rank: int, error: BaseException, what: str) -> None:
        """Go on without the engine that `take_out` has named; `what` is for the message. EngineLimitError, and no rank can be
        used any more, where it has failed too often."""
        cluster, now, worker = self.calls.cluster, time.monotonic(), self.worker(rank)
        cause = first_line(error).rstrip(".")
        if rank in self.slots:  # another process takes its place
            self.calls.progress.note(f"{worker} failed: {cause}. {what}")
            self._joined[rank].lose(cause)
            return
        limit, window_s = cluster.max_engine_restarts, cluster.engine_restart_window_s
        with self._lock:
            recent = [moment for moment in self._failures.get(rank, ()) if now - moment <= window_s]
            self._failures[rank] = [*recent, now]
        if len(recent) >= limit:
            self.calls.lose(f"the engine of {worker} failed again and again")
            raise EngineLimitError(
                f"the engine of {worker} failed {len(recent) + 1} times within {window_s:g} s; expected at most {limit} "
                f"(cluster.max_engine_restarts, cluster.engine_restart_window_s). The last time: {error}"
            ) from error
        self.calls.progress.note(
            f"the engine of {worker} failed: {cause}. {what}; it takes part again from the next refit on "
            f"({len(recent) + 1} of {limit} restarts within {window_s:g} s)"
        )

    def survivors(self, outcomes: Mapping[int, Outcome], *, is_shared: bool) -> dict[int, Outcome]:
        """The outcomes of a refit without those of engines that died in it, which are out from now on.

        All of them where no engine is left, where something else has gone wrong too, where the weights of one engine came by
        way of another (`is_shared`), or where one died beside its stream, whose samples need the weights: the refit has failed.
        """
        failed = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, BaseException)}
        # A rank may want memory for what it exports too.
        are_deaths = all(rank in self.hosts and isinstance(error, WorkerError) for rank, error in failed.items())
        is_outlived = are_deaths and all(map(self.outlive, failed.values()))
        streams = self._stream is not None and not failed.keys() <= self._out
        holding = [rank for rank in self.hosts if rank not in failed and not getattr(outcomes[rank], "is_starting", False)]
        if not failed or not is_outlived or is_shared or streams or not holding:
            return dict(outcomes)
        for rank, error in failed.items():
            self.take_out(rank)
            self.go_on(rank, error, "The others generate its share")
        return {rank: outcome for rank, outcome in outcomes.items() if rank not in failed}

    def moved(self, outcomes: Mapping[int, Outcome]) -> dict[int, Outcome]:
        """Return the outcomes of moving engines without those of engines that are out or died in it. All of them where
        something else has gone wrong too."""
        failed = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, BaseException)}
        # What lacked memory in it is neither here nor there, and nobody has started it anew.
        are_deaths = all(isinstance(error, WorkerError) for error in failed.values())
        if not are_deaths or not all(map(self.outlive, failed.values())):
            return dict(outcomes)
        for rank in sorted(failed.keys() & set(self.living)):
            self.take_out(rank)
            self.go_on(rank, failed[rank], "The others generate its share")
        return {rank: outcome for rank, outcome in outcomes.items() if rank not in failed}

    def refitted(self, ranks: Sequence[int], weight_version: int) -> None:
        """Note that these hosts hold weights; those that were out take part again."""
        with self._lock:
            back = sorted(self._out.intersection(ranks))
            self._out.difference_update(back)
            self._num_restarts += len({*back}.intersection(self.hosts))
            stream = self._stream
        for rank in back:
            for one in (*([] if stream is None else [stream]), *self._followers):
                one.rejoin(rank, weight_version)

    def follow(self, rejoins: Rejoins) -> None:
        """Tell another process which engines hold weights again."""
        self._followers.append(rejoins)

    @contextmanager
    def streaming(self, stream: Stream) -> Iterator[None]:
        """A stream that runs within the block takes back the engines that are refitted meanwhile."""
        self._stream = stream
        try:
            yield
        finally:
            self._stream = None

    def take_restarts(self) -> int:
        """Return how many engines have come back since the last time."""
        with self._lock:
            count, self._num_restarts = self._num_restarts, 0
        return count
