"""Interface of the two kinds of episodes: those that run turn by turn, and those that agents run."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence, Sized
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

from attrs import frozen

from rlcore.spi import EpisodeFailure, Row
from rlcore_rollout.environment_calls import EnvironmentCalls, TaskPool
from rlcore_rollout.environment_results import MaskedFailures
from rlcore_rollout.request_queue import RequestQueue, SampleCount
from rlcore_rollout.step_plans import StepPlans
from rlcore_rollout.trace_records import GroupRecord

GroupRewards: TypeAlias = tuple[Sequence[float], float]
"""The rewards of a group's samples, and the share of these that solved it."""


@frozen(kw_only=True, eq=False)
class GroupResult:
    """The figures of a group that has ended."""

    number: int
    """Its number in the run."""
    num_samples: int
    rewards: Sequence[float]
    """The rewards of its samples that have one."""
    success_rate: float
    """The share of these that solved it."""
    has_signal: bool
    """True where something can be learned from it."""
    rates_row: bool
    """True where its rewards say something of its own row."""
    replacement: Row | None = None
    """The row that took the place of its own."""
    num_long: int = 0
    """Rows whose prompts were over the limit."""
    is_left_out: bool = False
    """True where its row's prompt is over the limit, and no other takes its place."""


class PromptEvents(Protocol):
    """The events of groups that begin."""

    def begun(self, number: int) -> None:
        """A group has a prompt within the limit, or its environment failed."""

    def too_long(self, number: int, row: Row, num_tokens: int) -> None:
        """The prompt of a group's row is over the limit: the group waits for `replace`."""


class OpenGroup(Protocol):
    """The samples of one row."""

    @property
    def episodes(self) -> Sized:
        """Its episodes, once it has begun."""

    @property
    def number(self) -> int:
        """Its number in the run."""

    @property
    def num_rewarded(self) -> int:
        """Its samples that have a reward."""

    @property
    def rewards(self) -> Sequence[float]:
        """The rewards of these."""

    @property
    def success_rate(self) -> float:
        """The share of these that solved it; 0.0 where there are none."""

    def endings(self) -> Sequence[EpisodeFailure | None]:
        """Return how its episodes ended that have; None where by the policy."""

    def all_ended(self) -> bool:
        """Return whether all its episodes have."""

    def finish(self) -> None:
        """All have: forget what only the environment needs."""


GroupT = TypeVar("GroupT", bound=OpenGroup)


class GroupWork(ABC, Generic[GroupT]):
    """Begins groups and takes them to their end. But for what is said otherwise it is called on the event loop, or in another
    thread while none is at work."""

    requests: RequestQueue
    """The queue that asks for samples."""
    count: SampleCount
    task_pool: TaskPool
    failures: MaskedFailures
    plans: StepPlans
    """The plans that groups begin with."""
    group_size: int
    """Most samples of a group."""
    ends_without_samples: ClassVar[bool] = True
    """True where calls of the environment end while nothing is generated."""

    def now(self) -> float:
        """The time in seconds by which an environment's calls have theirs."""
        return time.monotonic()

    def open(self) -> None:
        """The work is about to begin. In the thread that generates."""

    def end(self) -> None:
        """Change nothing any more, whatever comes. In any thread, before the event loop's work is cancelled."""

    def close(self) -> None:
        """End what `open` began, once that is cancelled. In any thread."""

    @abstractmethod
    def new_group(self, number: int) -> GroupT:
        """A group before its beginning."""

    @abstractmethod
    def begin(
        self, calls: EnvironmentCalls, on_ended: Callable[[int], None], look: Callable[[], None], prompts: PromptEvents
    ) -> None:
        """Work on this event loop from now on. `on_ended` is called with the number of a group of which an episode has ended,
        or which has none; `look` where `request_next` may have something to do."""

    @abstractmethod
    def start(self, groups: Collection[GroupT], *, together: bool) -> None:
        """Go on with groups from where they are; with `together` those that begin now ask for nothing until `go_on`."""

    def begins(self, group: GroupT) -> bool:  # noqa: ARG002 - most ask for their prompts themselves
        """Return whether a group is to send one of PromptEvents."""
        return False

    def replace(self, group: GroupT, row: Row | None, spare: int) -> None:
        """See Collectors."""

    def go_on(self, numbers: Collection[int]) -> None:
        """See Collectors."""

    def take_arrived(self) -> None:
        """Take what has come while no event loop was at work; once all open groups go on."""

    def request_next(self, running: Iterable[GroupT]) -> None:
        """Ask for what was held back until now, before it is looked whether the batch is there."""

    @abstractmethod
    def forget(self, groups: Collection[GroupT]) -> None:
        """Groups are open no longer; what comes for them yet is thrown away."""

    @abstractmethod
    def restart(self, group: GroupT, *, is_at_work: bool) -> bool:
        """Begin again the episodes that have not ended, and have said something. Whether those are all of the group."""

    def row(self, group: GroupT) -> Row | None:
        """The row that a group has read; None where it is left out."""
        return self.plans.row(group.number)

    def row_number(self, group: GroupT) -> int | None:
        """Return the number in its data of the row that a group has read; None where it is unknown."""
        return self.plans.row_number(group.number)

    def rates_row(self, group: GroupT) -> bool:
        """Return whether the rewards of a group that has ended say something of its own row: several samples have one, and no
        other row took its place."""
        return group.num_rewarded > 1 and self.row(group) is self.plans.row(group.number)

    def extend(self, group: GroupT) -> bool:  # noqa: ARG002 - most groups have their samples from the beginning
        """Ask for further samples of a group that has ended, where it is to have some. Whether it is."""
        return False

    @abstractmethod
    def has_signal(self, group: GroupT) -> bool:
        """Return whether something can be learned from a group that has ended."""

    def result(self, group: GroupT) -> GroupResult:
        """The figures of a group that has ended."""
        return GroupResult(
            number=group.number,
            num_samples=len(group.episodes),
            rewards=group.rewards,
            success_rate=group.success_rate,
            has_signal=self.has_signal(group),
            rates_row=self.rates_row(group),
        )

    def records(self, groups: Sequence[GroupT]) -> list[GroupRecord] | None:  # noqa: ARG002 - no schedule repeats agents
        """See Collectors."""
        return None

    @abstractmethod
    def saved(self, group: GroupT) -> object | None:
        """Return the state of a group for a checkpoint; None where a resumed run starts the group again."""

    @abstractmethod
    def resumed(self, kept: Any) -> GroupT | None:
        """The group of what `kept` returned; None where it was begun otherwise than it would be here, and begins again."""
