"""A call that ranks are busy with: who is still to answer, what the others returned or raised, and which failed first."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from attrs import define, field

from rlcore.spi import RefitError, RlcoreError, WorkerError
from rlcore_ray.failures import WorkerInfo
from rlcore_ray.heartbeat import HeartbeatMonitor
from rlcore_ray.suspend_aware_clock import suspend_aware_time

Outcome: TypeAlias = Any
"""A rank's answer, or the exception that it raised; a WorkerError where it died."""


@define(kw_only=True, eq=False)
class PendingCall:
    """The answers and errors so far."""

    name: str
    began: float = field(factory=suspend_aware_time)
    """As `first_answer` and `first_failure`, by suspend_aware_time()."""
    began_counting: float = field(factory=time.perf_counter)
    """The time of the beginning by the clock of spans."""
    pending: dict[Any, int]
    """Ranks by their object references."""
    outcomes: dict[int, Outcome] = field(factory=dict)
    seconds: dict[int, float] = field(factory=dict)
    """The seconds that each rank took to answer."""
    watch: HeartbeatMonitor | None = None
    """None where nothing is asked of the ranks meanwhile, as before they have arrived."""
    first_answer: float | None = None
    first_failure: float | None = None
    failed_first: int | None = None

    @property
    def first_error(self) -> BaseException:
        """The error of the rank that failed first; there has to be one."""
        assert self.failed_first is not None
        error = self.outcomes[self.failed_first]
        assert isinstance(error, BaseException)
        return error

    @property
    def goes_on(self) -> bool:
        """True where the rank that failed has let the others go on: each loads its plugins by itself; a generator that fails a
        refit does not end the export, and one that dies as it moves keeps no other one."""
        has_left = self.name in ("refit", "move_generator") and isinstance(self.first_error, RefitError | WorkerError)
        return has_left or self.name == "prepare"

    def take(self, rank: int, outcome: Outcome) -> None:
        """A rank has answered."""
        now = suspend_aware_time()
        self.outcomes[rank] = outcome
        self.seconds[rank] = time.perf_counter() - self.began_counting
        self.first_answer = self.first_answer or now
        if isinstance(outcome, BaseException) and self.first_failure is None:
            self.first_failure, self.failed_first = now, rank


def values(outcomes: Mapping[int, Outcome], workers: Sequence[WorkerInfo], first: int | None = None) -> list[Any]:
    """The outcomes, none of which may be an error: the first one's is raised, with the names of the others."""
    failed = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, BaseException)}
    if not failed:
        return list(outcomes.values())
    # Where one rank's failure makes others fail, these know only of a lost connection.
    order = sorted(failed, key=lambda rank: (not isinstance(failed[rank], RlcoreError), rank != first, rank))
    error: BaseException = failed[order[0]]
    others = [f"{workers[rank]}: {type(failed[rank]).__name__}" for rank in order[1:]]
    if others:
        error.add_note(f"raised on other ranks too: {'; '.join(others)}")
    raise error
