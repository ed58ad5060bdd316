"""Calling all ranks: answers, errors, deaths and lateness, each with the name of its rank."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import define, evolve, field, frozen

from rlcore.spi import ExecutionProgress, WorkerError
from rlcore_ray.config import RayConfig
from rlcore_ray.failures import PoolName, Reply, WorkerInfo, cause_of_death, with_origin
from rlcore_ray.heartbeat import HeartbeatMonitor, SilentRanks
from rlcore_ray.pending_call import Outcome, PendingCall, values
from rlcore_ray.rank_stacks import stacks_of_ranks
from rlcore_ray.suspend_aware_clock import suspend_aware_time
from rlcore_workers.logged_process import last_lines

BESIDE = "beside"
"""The concurrency group of what a worker answers at once while it is busy."""
COLLECT = "collect"
"""The concurrency group of what waits in a worker for samples of its stream."""
POLL_S = 0.25
GRACE_S = 5.0
"""Seconds that the other ranks get to answer after one has failed: an error that all have is the error of the call."""
QUERY_TIMEOUT_S = 3.0
"""Most seconds for a rank to say where it is."""
CLOSE_S = 30.0

_GENERATOR = dict.fromkeys(("build_generator", "move_generator", "save_generator", "load_generator"), ("generator",))
_POOLS: Mapping[str, tuple[str, ...]] = {**_GENERATOR, "refit": ("trainer", "generator")}
"""The pools that work in a call, by its name; a call that is not named is the trainer's, or the reference's."""
_USUAL_LIMIT = "until cluster.straggler_timeout_s after the first rank's answer, or cluster.call_timeout_s"


class PoolLostError(WorkerError):
    """The pool was given up, for a reason that is an error of its own elsewhere."""


@frozen(kw_only=True, eq=False)
class Rank:
    """One worker and the rank that it has."""

    worker: WorkerInfo
    actor: Any


@define(kw_only=True, eq=False)
class Calls:
    """Calls to the ranks of a pool. After a death, a hang, or different outcomes of what changes all, no rank can be used."""

    ranks: Sequence[Rank]
    cluster: RayConfig
    progress: ExecutionProgress
    pool: PoolName = "trainer"
    """The pool of a call that is not named as another pool's."""
    lost: str | None = None
    """The reason why the pool cannot be used any more."""
    unusable: set[int] = field(factory=set)
    """Ranks whose backends are in an unknown state."""
    _silent: SilentRanks = field(init=False)
    _left_behind: list[PendingCall] = field(factory=list)
    """Calls whose answers nobody waits for, after another rank's failure."""
    _attached: list[Any] = field(factory=list)
    """Actors that end with the ranks."""
    _at_rest: dict[str, str] = field(factory=dict)
    """The display of a pool between calls, where it is not idle."""

    @_silent.default
    def _none_silent(self) -> SilentRanks:
        return SilentRanks(name=lambda rank: str(self.workers[rank]), tell=self.progress.note)

    @property
    def workers(self) -> list[WorkerInfo]:
        """The node and process of each rank."""
        return [rank.worker for rank in self.ranks]

    @property
    def is_usable(self) -> bool:
        """Return whether every rank lives and is in a known state."""
        return self.lost is None and not self.unusable

    def locate(self, workers: Sequence[WorkerInfo]) -> None:
        """Know from now on where the ranks live."""
        self.ranks = [evolve(rank, worker=worker) for rank, worker in zip(self.ranks, workers, strict=True)]

    def all(
        self, name: str, *arguments: Any, each: Sequence[tuple[Any, ...]] | None = None, limit_s: float | None = None
    ) -> list[Any]:
        """Call every rank and return the answers, by rank; ranks may wait for each other in it."""
        return self.values(self.outcomes(name, *arguments, each=each, limit_s=limit_s))

    def together(self, name: str, each: Sequence[tuple[Any, ...]]) -> list[Any]:
        """`all` of what changes the ranks' states, so that it has to succeed or fail on all of them alike."""
        outcomes = self.outcomes(name, each=each)
        if len({type(outcome) if isinstance(outcome, BaseException) else None for outcome in outcomes.values()}) > 1:
            self.lose(f"{name} ended differently on different ranks")
        return self.values(outcomes)

    def apart(self, name: str, arguments: Mapping[int, tuple[Any, ...]], *, limit_s: float | None = None) -> list[Any]:
        """Call some ranks, each by itself, and return the answers in the order of `arguments`: where one fails, the others are
        left to end."""
        wait = self._apart(name, arguments, limit_s)
        return self.values({rank: wait.outcomes[rank] for rank in arguments if rank in wait.outcomes}, wait.failed_first)

    def outcomes_apart(self, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Outcome]:
        """`apart`, with what they raised."""
        return dict(sorted(self._apart(name, arguments, None).outcomes.items()))

    def _apart(self, name: str, arguments: Mapping[int, tuple[Any, ...]], limit_s: float | None) -> PendingCall:
        wait = self._begin(name, arguments, limit_s)
        with self._under_way(wait):
            while wait.pending:
                self._collect(wait)
                self._check_limit(wait, limit_s)
                if _keeps_others(wait):
                    break
        return wait

    def outcomes(
        self, name: str, *arguments: Any, each: Sequence[tuple[Any, ...]] | None = None, limit_s: float | None = None
    ) -> dict[int, Outcome]:
        """Call every rank and return its answer or error. WorkerError where one died or hangs; the error of one for which
        others wait."""
        given = [arguments] * len(self.ranks) if each is None else each
        wait = self._begin(name, dict(enumerate(given)), limit_s)
        with self._under_way(wait):
            while wait.pending:
                self._collect(wait)
                self._check_limit(wait, limit_s)
                self._check_others(wait, limit_s)
        return dict(sorted(wait.outcomes.items()))

    def beside(
        self, name: str, arguments: Mapping[int, tuple[Any, ...]], group: str = BESIDE, limit_s: float | None = None
    ) -> list[Any]:
        """Call some ranks beside the calls that they are busy with, and return the answers in the order of `arguments`. From
        any thread."""
        wait = self._beside(name, arguments, group, limit_s)
        return self.values({rank: wait.outcomes[rank] for rank in arguments}, wait.failed_first)

    def outcome_beside(self, name: str, rank: int, group: str) -> Outcome:
        """`beside` of one rank; what it raised is returned, so that it is told from an error of the driver's own."""
        return self._beside(name, {rank: ()}, group).outcomes[rank]

    def _beside(
        self, name: str, arguments: Mapping[int, tuple[Any, ...]], group: str, limit_s: float | None = None
    ) -> PendingCall:
        self._require_workers(name)
        actors = {rank: self.ranks[rank].actor for rank in arguments}
        references = {
            actors[rank].beside.options(concurrency_group=group).remote(name, *given): rank for rank, given in arguments.items()
        }
        wait = PendingCall(name=name, pending=references, watch=self._watch(name))
        while wait.pending:
            self._collect(wait)
            self._check_limit(wait, limit_s)
            self._check_late(wait)  # what is asked beside the calls is answered at once
        return wait

    def post(self, name: str, rank: int, *arguments: Any) -> None:
        """Call a rank as `beside` does, and wait for no answer. A rank that is gone takes no notice."""
        if self.lost is None:
            self.ranks[rank].actor.beside.options(concurrency_group=BESIDE).remote(name, *arguments)

    def require_progress(self, name: str, rank: int, since: float) -> None:
        """Raise WorkerError and give all ranks up where one made no progress for as long as a call may take. Thread-safe.

        `since` is a time of suspend_aware_time()."""
        self._check_limit(PendingCall(name=name, began=since, pending={None: rank}), None)

    @contextlib.contextmanager
    def streaming(self, num_ranks: int) -> Iterator[None]:
        """Show the generators at work meanwhile, also between the calls that their ranks are busy with."""
        self._at_rest["generator"] = _on_ranks("stream", num_ranks)
        self.progress.pool("generator", self._at_rest["generator"])
        start = time.perf_counter()
        try:
            yield
        finally:
            del self._at_rest["generator"]
            self.progress.span("generator", "stream", start, [time.perf_counter() - start] * num_ranks)
            self.progress.pool("generator", "idle")

    def values(self, outcomes: Mapping[int, Outcome], first: int | None = None) -> list[Any]:
        """The outcomes, none of which may be an error: the first one's is raised, with the names of the others."""
        return values(outcomes, self.workers, first)

    def lose(self, reason: str) -> None:
        """Give the whole pool up."""
        self.lost = self.lost or reason
        self.kill()

    def close(self) -> None:
        """Let every rank free what it holds, as far as it does so in time."""
        if self.is_usable:
            self._close_attached()
            with contextlib.suppress(WorkerError):
                self.all("close", limit_s=CLOSE_S)

    def _close_attached(self) -> None:
        import ray

        asked = [actor.close.remote() for actor in self._attached]
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=CLOSE_S)

    def kill(self) -> None:
        """Kill every worker."""
        import ray

        self.lost = self.lost or "they were ended"
        for actor in (*self._attached, *(rank.actor for rank in self.ranks)):
            with contextlib.suppress(Exception):
                ray.kill(actor)

    def attach(self, actor: Any) -> None:
        """Close and kill an actor with the ranks; it has a method `close`."""
        self._attached.append(actor)

    def query(self, ranks: Sequence[int], name: str, otherwise: Any) -> list[Any]:
        """Ask busy ranks beside their work, and return their answers; `otherwise` stands for those that do not answer."""
        import ray

        queries = [self._ask(rank, name) for rank in ranks]
        ready, _ = ray.wait(queries, num_returns=len(queries), timeout=QUERY_TIMEOUT_S)
        answers = []
        for reference in queries:
            answer = otherwise
            if reference in ready:
                with contextlib.suppress(ray.exceptions.RayError):
                    answer = ray.get(reference)
            answers.append(answer)
        return answers

    def _ask(self, rank: int, name: str) -> Any:
        return getattr(self.ranks[rank].actor, name).options(concurrency_group=BESIDE).remote()

    def _watch(self, name: str, limit_s: float | None = None) -> HeartbeatMonitor:
        return HeartbeatMonitor(
            call=name,
            ask=lambda rank: self._ask(rank, "where"),
            silent=self._silent,
            limit=_USUAL_LIMIT if limit_s is None else f"for {limit_s:g} s at most",
        )

    def _begin(self, name: str, arguments: Mapping[int, tuple[Any, ...]], limit_s: float | None) -> PendingCall:
        self._require_workers(name)
        while self._left_behind:
            wait = self._left_behind[0]
            while wait.pending:
                self._collect(wait)
                self._check_limit(wait, None)
            self._left_behind.remove(wait)
        references = {self.ranks[rank].actor.call.remote(name, *given): rank for rank, given in arguments.items()}
        have_arrived = all(worker.pid for worker in self.workers)
        return PendingCall(name=name, pending=references, watch=self._watch(name, limit_s) if have_arrived else None)

    @contextlib.contextmanager
    def _under_way(self, wait: PendingCall) -> Iterator[None]:
        """However the driver stops to wait, after Ctrl-C too: the next call waits for what is still under way."""
        pools = _POOLS.get(wait.name, (self.pool,))
        for pool in pools:
            self.progress.pool(pool, _on_ranks(wait.name, len(wait.pending)))
        try:
            yield
        finally:
            for pool in pools:
                self.progress.pool(pool, self._at_rest.get(pool, "idle"))
                if wait.seconds:
                    self.progress.span(
                        pool, wait.name, wait.began_counting, [wait.seconds[rank] for rank in sorted(wait.seconds)]
                    )
            if wait.pending and self.lost is None:
                self._left_behind.append(wait)

    def _require_workers(self, name: str) -> None:
        if self.lost is not None:
            raise PoolLostError(f"{name}: the workers are gone: {self.lost}")

    def _collect(self, wait: PendingCall) -> None:
        """Take the answers that come within a moment. WorkerError where another thread has given the pool up."""
        import ray

        self._require_workers(wait.name)
        pending = list(wait.pending)
        ready, _ = ray.wait(pending, num_returns=len(pending), timeout=POLL_S)
        if wait.watch is not None:
            wait.watch.look(list(wait.pending.values()))
        for reference in ready:
            rank = wait.pending.pop(reference)
            try:
                outcome = self._outcome(rank, ray.get(reference))
            except ray.exceptions.RayError as error:
                self._require_workers(wait.name)
                raise self._death(rank, wait, error) from None
            wait.take(rank, outcome)
            self._silent.heard(rank, wait.name)

    def _outcome(self, rank: int, reply: Reply) -> Outcome:
        if not reply.is_usable:
            self.unusable.add(rank)
        if reply.error is None:
            return reply.value
        return with_origin(reply.error.restore(), self.workers[rank], reply.error)

    def _death(self, rank: int, wait: PendingCall, error: Exception) -> WorkerError:
        """The error for a rank that ended; all others then wait for it in vain."""
        worker = self.workers[rank]
        reason = f"{worker} {cause_of_death(error, worker)}. {last_lines(worker.log_file)}"
        self.lose(reason)  # whoever finds the pool gone says as much: it may be the first to be heard
        return WorkerError(f"{wait.name}: {reason}")

    def _check_limit(self, wait: PendingCall, limit_s: float | None) -> None:
        """Give the pool up where a rank takes too long."""
        limit = self.cluster.call_timeout_s if limit_s is None else limit_s
        if wait.pending and suspend_aware_time() - wait.began > limit:
            self._give_up(wait, f"no answer within {limit:g} s", "cluster.call_timeout_s" if limit_s is None else None)

    def _check_others(self, wait: PendingCall, limit_s: float | None) -> None:
        """Give the pool up where a rank lags behind the first, or waits for one that has failed."""
        if wait.pending and _keeps_others(wait):
            self._abandon(wait)
        if limit_s is None:
            self._check_late(wait)

    def _check_late(self, wait: PendingCall) -> None:
        """Give the pool up where a rank lags behind the first."""
        late_s = self.cluster.straggler_timeout_s
        if wait.pending and wait.first_answer is not None and suspend_aware_time() - wait.first_answer > late_s:
            self._give_up(wait, f"no answer {late_s:g} s after the first rank's", "cluster.straggler_timeout_s")

    def _abandon(self, wait: PendingCall) -> None:
        """One rank has failed, and others wait for it: raise its error."""
        late = self._positions(wait)
        self.lose(f"rank {wait.failed_first} failed in {wait.name} while others waited for it")
        wait.first_error.add_note(f"Ranks that still waited were ended: {late}")
        self.values(wait.outcomes, wait.failed_first)

    def _give_up(self, wait: PendingCall, what: str, key: str | None) -> None:
        positions = self._positions(wait)
        ranks = sorted(wait.pending.values())
        lines = "\n".join(last_lines(self.workers[rank].log_file) for rank in ranks[:1])
        stacks = stacks_of_ranks([self.workers[rank] for rank in ranks])
        self.lose(f"rank(s) {', '.join(map(str, ranks))} gave no answer to {wait.name}. {lines}")
        remedy = f" If it only needs longer, raise {key}." if key else ""
        error = WorkerError(f"{wait.name}: {what} from {positions}.{remedy} {stacks} {lines}")
        if wait.failed_first is not None:  # it may be what the others never got over
            error.add_note(f"{self.workers[wait.failed_first]} had failed before: {wait.first_error}")
        raise error

    def _positions(self, wait: PendingCall) -> str:
        """The ranks that have not answered, each with what it does; those that wait for others are told by their line."""
        ranks = sorted(wait.pending.values())
        found = self.query(ranks, "where", "which does not answer at all")
        return "; ".join(f"{self.workers[rank]} {position}" for rank, position in zip(ranks, found, strict=True))


def _keeps_others(wait: PendingCall) -> bool:
    """Return whether a rank has failed for which the others wait, and they have had their time to fail too."""
    return wait.first_failure is not None and suspend_aware_time() - wait.first_failure > GRACE_S and not wait.goes_on


def _on_ranks(name: str, num_ranks: int) -> str:
    return f"{name} on {num_ranks} rank{'s' if num_ranks > 1 else ''}"
