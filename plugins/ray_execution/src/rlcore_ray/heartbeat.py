"""Detects ranks that answer no probe, such as a stopped process or an unreachable machine, and reports them by name."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from attrs import define, field

from rlcore_ray.suspend_aware_clock import suspend_aware_time

PROBE_S = 5.0
"""Seconds between two questions to a rank."""
SILENT_S = 15.0
"""Seconds without an answer after which a rank is told; with PROBE_S, at most 20 s after it fell silent, and a look."""


@define(eq=False)
class SilentRanks:
    """The ranks of a pool that answer nothing. Each is reported once, by the first call that notices. From any thread."""

    name: Callable[[int], str]
    """Returns a rank's name in messages."""
    tell: Callable[[str], None]
    _ranks: set[int] = field(factory=set, init=False)
    _heard: dict[int, float] = field(factory=dict, init=False)
    """The time of each rank's last answer, by suspend_aware_time()."""
    _changing: threading.Lock = field(factory=threading.Lock, init=False)
    """Held while something is told too, so that it is told in the order in which it happens."""

    def unanswered(self, rank: int, since: float, call: str, position: str, limit: str) -> None:
        """Record that a rank has not answered a call's probe, sent at `since` by suspend_aware_time().

        `position` is the rank's last answer, or empty, and `limit` how long the call waits."""
        with self._changing:
            # What it has answered to another call tells that it goes on, and that this question's answer is on its way.
            if rank in self._ranks or suspend_aware_time() - max(since, self._heard.get(rank, since)) <= SILENT_S:
                return
            self._ranks.add(rank)
            known = f", {position}" if position else ""
            self.tell(
                f"{call}: {self.name(rank)} has answered nothing for {SILENT_S:g} s{known}: its process is stopped, its "
                f"machine does not answer, or it is in native code that lets nothing else run. The run waits for it {limit}"
            )

    def heard(self, rank: int, call: str) -> None:
        """A rank has answered."""
        with self._changing:
            self._heard[rank] = suspend_aware_time()
            if rank in self._ranks:
                self._ranks.remove(rank)
                self.tell(f"{call}: {self.name(rank)} answers again")


@define(kw_only=True, eq=False)
class HeartbeatMonitor:
    """Asks the ranks of one call where they are, beside their work, and tells of each that does not answer."""

    call: str
    ask: Callable[[int], Any]
    """Returns Ray's reference to a rank's answer."""
    silent: SilentRanks
    limit: str
    """The time limit of the call, in words for messages."""
    next_probe: float = field(factory=lambda: suspend_aware_time() + PROBE_S)
    """Time of the next probe, by suspend_aware_time() as all times here."""
    _asked: dict[int, tuple[Any, float]] = field(factory=dict)
    """The question that is open at each rank, and since when."""
    _positions: dict[int, str] = field(factory=dict)
    """Each rank's last answer."""

    def look(self, ranks: Sequence[int]) -> None:
        """Take what has been answered, ask anew, and tell of those ranks that are silent. Never waits."""
        now = suspend_aware_time()
        self._take_answers(ranks)
        if now >= self.next_probe:
            self.next_probe = now + PROBE_S
            self._asked |= {rank: (self.ask(rank), now) for rank in ranks if rank not in self._asked}
        for rank in ranks:
            if rank in self._asked and now - self._asked[rank][1] > SILENT_S:
                self.silent.unanswered(rank, self._asked[rank][1], self.call, self._positions.get(rank, ""), self.limit)

    def _take_answers(self, ranks: Sequence[int]) -> None:
        import ray

        references = {reference: rank for rank, (reference, _) in self._asked.items() if rank in ranks}
        ready, _ = ray.wait(list(references), num_returns=len(references), timeout=0) if references else ([], [])
        for reference in ready:
            rank = references[reference]
            del self._asked[rank]
            with contextlib.suppress(ray.exceptions.RayError):  # that it died, the call itself says
                self._positions[rank] = ray.get(reference)
                self.silent.heard(rank, self.call)
