"""Interface between the schedule of a run and what collects its groups, in this process or in others.

EpisodeRun, with its Schedule                 the driver decides which groups begin, and which make a batch
   │  Collectors
   ├─ GroupCollector                          one collector: in the driver
   └─ RemoteCollectors                        several: each group goes to one of them by its number
         │  Command, Event
      CollectorProcesses                      the messages of all
         │  HostedCollector, CollectorActor   carried by Ray
      CollectorProcess, with GroupCollector   one of them, in a process beside its engines
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias, TypeVar

from rlcore.run.protocols import CollectedRollouts
from rlcore.spi import Row
from rlcore.spi.execution import GeneratorGroup
from rlcore_rollout.failures import LeftOut, Outcome
from rlcore_rollout.group_work import GroupResult, PromptEvents
from rlcore_rollout.trace_records import GroupRecord

T = TypeVar("T")
MayGoOn: TypeAlias = Callable[[], bool]


class GroupEvents(PromptEvents, Protocol):
    """The events of groups, on which the schedule decides. They come one at a time, where `Collectors.between` runs."""

    def ended(self, result: GroupResult) -> None:
        """All episodes of a group have ended."""

    def left_out(self, episodes: LeftOut) -> None:
        """No step trains on some episodes. From any thread."""

    def look(self) -> None:
        """The next batch may be there."""


class Collectors(ABC):
    """The collectors of a run's groups: one in this process, or several in processes of their own.

    The thread that trains calls the functions of the first part. The others run where `between` runs functions, in which no
    event comes and nothing changes.
    """

    @abstractmethod
    def listen(self, events: GroupEvents) -> None:
        """Send events there. Called once, before all else."""

    @abstractmethod
    def begin_step(self) -> None:
        """Count the seconds of `idle_s` and `busy_s` anew."""

    @abstractmethod
    def generate(
        self, generator: GeneratorGroup, weight_version: int, is_complete: Callable[[], bool], may_go_on: MayGoOn
    ) -> None:
        """Generate until `is_complete`, which is asked where `between` runs functions, or until `may_go_on` is False. Raises
        what ends the work; after a WorkerError it can be called again."""

    @property
    @abstractmethod
    def is_generating(self) -> bool:
        """Return whether the generator goes on while others train."""

    @abstractmethod
    def pause(self) -> None:
        """End a stream that goes on: what has not ended goes on in the next. Raises an error only where the generator cannot be
        used any more."""

    @abstractmethod
    def idle_s(self) -> float:
        """Return the seconds in which no sample was asked for: what was waited for was the environment."""

    @abstractmethod
    def busy_s(self) -> float:
        """Return the seconds in which samples were generated."""

    @property
    @abstractmethod
    def has_failed(self) -> bool:
        """Return whether the next `generate` raises an error."""

    @abstractmethod
    def raise_failure(self) -> None:
        """Raise the error that was kept, if there is one."""

    @abstractmethod
    def between(self, function: Callable[[], T]) -> T:
        """Return the result of a function that runs between two events."""

    @abstractmethod
    def call(self, function: Callable[[], T]) -> T:
        """As `between`. Raises what ends the work."""

    @abstractmethod
    def packed(self, numbers: Sequence[int]) -> CollectedRollouts:
        """Return the samples of groups that have ended, groups adjacent in this order. Other groups go on meanwhile."""

    @abstractmethod
    def still(self) -> AbstractContextManager[None]:
        """Make no call of the environment within the block, which begins once those under way have ended. Calls that only end
        with samples wait within the block."""

    @abstractmethod
    def close(self) -> None:
        """End all work, where it is: no event comes when this returns."""

    @abstractmethod
    def begin(self, numbers: Sequence[int]) -> Sequence[int]:
        """Begin groups. Returns those that send `begun` or `too_long`."""

    @abstractmethod
    def replace(self, number: int, row: Row | None, spare: int) -> None:
        """Begin a group whose prompt was too long with another row, the spare one of that number; None leaves it out."""

    @abstractmethod
    def go_on(self, numbers: Collection[int]) -> None:
        """Ask for the first turns of groups that start together: all of them have begun."""

    @abstractmethod
    def forget(self, numbers: Collection[int], outcome: Outcome | None) -> None:
        """Groups are open no longer. With an `outcome` no step trains on them, and `left_out` names their episodes."""

    @abstractmethod
    def restart(self, numbers: Collection[int]) -> list[int]:
        """Begin again the episodes of groups that have not ended, and have said something. Returns the groups of which those
        are all."""

    @abstractmethod
    def request_complete(self) -> None:
        """The batch is there: a stream that does not go on ends."""

    @abstractmethod
    def records(self, numbers: Sequence[int]) -> list[GroupRecord] | None:
        """Return the traces of groups that have ended, but for `began`; None where no replay could repeat them."""

    @abstractmethod
    def saved(self, numbers: Sequence[int]) -> tuple[dict[int, bytes], list[str]]:
        """Return the states of groups for a checkpoint, and an error for each that has none."""

    @abstractmethod
    def resume(self, saved: Mapping[int, bytes], running: Collection[int]) -> dict[int, GroupResult | None]:
        """Open the groups of a checkpoint; those of `running` go on. Returns the results of the others, and None for these;
        groups are left out that this run would have begun otherwise."""

    @abstractmethod
    def begins(self, number: int) -> bool:
        """Return whether a group is to send `begun` or `too_long`."""
