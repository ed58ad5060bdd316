"""The schedule of a run's groups: it lets groups begin, and takes those of the next step once they have ended."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from rlcore.run.protocols import CollectedRollouts
from rlcore.spi import ContractError, Row, WorkerError
from rlcore.spi.execution import GeneratorGroup
from rlcore_rollout.collectors import Collectors, MayGoOn
from rlcore_rollout.environment_results import MaskedFailures
from rlcore_rollout.failures import LeftOut
from rlcore_rollout.group_starts import GroupStarts
from rlcore_rollout.group_work import GroupResult, GroupRewards
from rlcore_rollout.schedule import Schedule
from rlcore_rollout.step_plans import PromptLimit, StepPlans
from rlcore_rollout.trace_records import GroupRecord

T = TypeVar("T")


class EpisodeRun:
    """Groups under way, by number: which may begin, which make a batch, and the results of those that have ended.

    Collectors run the groups. All that the schedule decides on is looked at and changed where `Collectors.between` runs.
    """

    def __init__(
        self,
        *,
        schedule: Schedule,
        plans: StepPlans,
        failures: MaskedFailures,
        collectors: Collectors,
        limit: PromptLimit | None,
        group_size: int,
    ) -> None:
        """`plans` are what groups begin with, `limit` is that of their prompts, and `group_size` the most samples of one."""
        self.schedule = schedule
        self.plans = plans
        self.failures = failures
        self.collectors = collectors
        self._group_size = group_size
        self._starts = GroupStarts(plans, limit, collectors, together=schedule.policy.starts_together)
        self._results: dict[int, GroupResult] = {}
        """The results of the open groups that have ended."""
        self.replaced: dict[int, GroupRewards] = {}
        """The rewards of groups that were replaced, by number; no rewards of those that say nothing of their rows."""
        self._left_out: list[LeftOut] = []
        """Episodes that no step trains on, since the list was taken last."""
        collectors.listen(self)

    # In the thread that trains.

    def collect(self, generator: GeneratorGroup, weight_version: int, may_go_on: MayGoOn = lambda: True) -> list[int]:
        """Generate until the next step's batch is there, and return its groups; none where `may_go_on` turned False before.

        Raises what ends the run, also where that came since the last batch: what follows a batch fails by itself alone. After a
        WorkerError it can be called again: what was lost is generated once more."""
        collectors = self.collectors
        collectors.begin_step()
        try:
            collectors.raise_failure()
            collectors.call(self._admit)
            collectors.generate(generator, weight_version, self.schedule.can_take, may_go_on)
            numbers = collectors.between(self._take)
            if not numbers:
                collectors.raise_failure()  # else the batch that is there is trained on first
            return numbers
        except WorkerError:
            raise
        except BaseException:
            self.close()
            raise

    def packed(self) -> CollectedRollouts:
        """Return the samples of the batch that was taken, groups adjacent and ascending."""
        return self.collectors.packed([one.number for one in self.results() if not one.is_left_out])

    def records(self) -> list[GroupRecord] | None:
        """Return the traces of these groups; None where no replay could repeat them."""
        return self.between(lambda: self.collectors.records(sorted(self.schedule.training)))

    def results(self) -> list[GroupResult]:
        """Return the results of these groups."""
        return self.between(self._taken)

    def take_left_out(self) -> list[LeftOut]:
        """Return the episodes that no step trains on, since the last time, in the order of their rows."""
        left_out, self._left_out = self._left_out, []
        return sorted(left_out, key=lambda one: -1 if one.row is None else one.row)

    def row(self, result: GroupResult) -> Row | None:
        """The row that a group has read; None where it is left out."""
        own = self.plans.row(result.number) if result.replacement is None else result.replacement
        return None if result.is_left_out else own

    def row_number(self, result: GroupResult) -> int | None:
        """Return the number in its data of the row that a group has read; None where it is unknown."""
        return None if result.replacement is not None else self.plans.row_number(result.number)

    def train(self) -> None:
        """The last batch was trained on: it is forgotten, and what is too old for the next one."""
        self.between(self._forget_trained)
        if self.collectors.is_generating:
            self.between(self._admit)

    @property
    def has_failed(self) -> bool:
        """Return whether something has that the next `collect` raises."""
        return self.collectors.has_failed

    def pause(self) -> None:
        """End the stream in the background, if there is one: what has not ended goes on in the next. Raises what it raised
        where the generator cannot be used any more."""
        self.collectors.pause()

    def restart(self) -> None:
        """Begin all episodes once more that have not ended."""
        self.between(self._restart)

    def between(self, function: Callable[[], T]) -> T:
        """Return the result of a function, while no group changes."""
        return self.collectors.between(function)

    def restore(self, saved: Mapping[int, bytes]) -> int:
        """Go on with the groups of a checkpoint; the schedule is where it was then. Those that are not in it, or that this run
        would have begun otherwise, begin again; returns how many the latter are."""
        return self.between(lambda: self._restore(saved))

    def _restore(self, saved: Mapping[int, bytes]) -> int:
        schedule, open_groups = self.schedule, self.schedule.open_groups
        known = {number: saved[number] for number in open_groups if number in saved}
        found = self.collectors.resume(known, schedule.running)
        lost = [number for number in open_groups if number not in found]
        for number in lost:
            schedule.restart(number)
        self.collectors.begin(lost)
        self._results |= {number: result for number, result in found.items() if result is not None}
        self._starts.begin([number for number in sorted(schedule.running) if self.collectors.begins(number)])
        return len(known) - len(found)

    @contextmanager
    def still(self) -> Iterator[None]:
        """No call of the environment begins within the block, and those that were under way have ended: it may be called
        otherwise, as many times at once as it can work on. Calls that only end with samples wait within the block."""
        with self.collectors.still():
            yield

    def close(self) -> None:
        """End all work, where it is: what is known of groups changes no more when this returns."""
        self.collectors.close()

    # Where `Collectors.between` runs.

    def begun(self, number: int) -> None:
        """See PromptEvents."""
        self._starts.begun(number)

    def too_long(self, number: int, row: Row, num_tokens: int) -> None:
        """See PromptEvents."""
        self._starts.too_long(number, row, num_tokens)

    def ended(self, result: GroupResult) -> None:
        """See GroupEvents."""
        number = result.number
        counts = self.schedule.policy.max_refills is None or result.has_signal
        if self.schedule.end(number, has_signal=counts):
            self._results[number] = result
        else:
            self.replaced[number] = (result.rewards if result.rates_row else (), result.success_rate)
            self.failures.replace(number, result.num_samples)
            self.collectors.forget([number], "asked again")
        self._admit()

    def left_out(self, episodes: LeftOut) -> None:
        """See GroupEvents."""
        self._left_out.append(episodes)

    def look(self) -> None:
        """End the stream where the batch is there. ContractError where none can come: no run may wait for that."""
        if self.schedule.can_take():
            self.collectors.request_complete()
        elif self.schedule.is_stuck:
            raise ContractError(
                f"no group runs, and {self.schedule.num_complete} complete ones make no batch; this is a defect of rlcore"
            )

    def _taken(self) -> list[GroupResult]:
        return [self._results[number] for number in sorted(self.schedule.training)]

    def _admit(self) -> None:
        """Begin the groups that may."""
        if begun := self.schedule.admit():
            self._starts.begin(self.collectors.begin(begun))

    def _take(self) -> list[int]:
        self.failures.check()
        return self.schedule.take()

    def _forget_trained(self) -> None:
        replaced = self.schedule.refilled
        trained = set(self.schedule.training)
        closed = self.schedule.train()
        self._forget([number for number in closed if number in trained], trained=True)
        self._forget([number for number in closed if number not in trained], trained=False)
        self.failures.forget(self._group_size, [*closed, *replaced])
        self.replaced = {number: found for number, found in self.replaced.items() if number not in replaced}
        self.plans.keep([*self.schedule.open_groups, self.schedule.next_number])

    def _forget(self, numbers: Collection[int], *, trained: bool) -> None:
        self.collectors.forget(numbers, None if trained else "dropped")
        for number in numbers:
            self._results.pop(number, None)
        self._starts.give_up(numbers)

    def _restart(self) -> None:
        for number in self.collectors.restart(list(self.schedule.running)):
            if number in self.schedule.running:  # or it was left out while the collectors answered
                self.schedule.restart(number)
