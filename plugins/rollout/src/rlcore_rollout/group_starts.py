"""Groups that begin: those of a step whose prompts are too long get other rows, and first turns are asked for together."""

from collections.abc import Collection, Mapping

from rlcore.spi import Row
from rlcore_rollout.collectors import Collectors
from rlcore_rollout.step_plans import PromptLimit, StepBatch, StepPlans


class GroupStarts:
    """The groups of a run of which it is not known yet whether their prompts are within the limit."""

    def __init__(self, plans: StepPlans, limit: PromptLimit | None, collectors: Collectors, *, together: bool) -> None:
        """`limit` is None where no group says what its prompt is. `together` lets the groups of a step ask for their first
        turns once all of them have begun."""
        self._plans = plans
        self._limit = limit
        self._collectors = collectors
        self._together = together
        self._batches: dict[int, StepBatch] = {}
        """The groups that began with each, by number."""

    def begin(self, numbers: Collection[int]) -> None:
        """Groups begin. Those of one step form a step batch."""
        steps: dict[int, list[int]] = {}
        for number in numbers:
            steps.setdefault(self._plans.step_of(number), []).append(number)
        for step, members in steps.items():
            assert self._limit is not None, "only prompts within a limit are waited for"
            batch = StepBatch(
                plan=self._plans.of_step(step),
                limit=self._limit,
                num_unknown=len(members),
                groups=members if self._together else (),
            )
            self._batches |= dict.fromkeys(members, batch)

    def begun(self, number: int) -> None:
        """See PromptEvents."""
        if (batch := self._batches.pop(number, None)) is not None:
            self._give_places(number, batch.begun())
            self._count_begun(batch)

    def too_long(self, number: int, row: Row, num_tokens: int) -> None:
        """See PromptEvents."""
        if (batch := self._batches.get(number)) is not None:
            self._give_places(number, batch.too_long(self._plans.place_of(number), row, num_tokens))

    def give_up(self, numbers: Collection[int]) -> None:
        """Groups are open no longer; some of them may have begun."""
        left = {number: self._batches.pop(number) for number in numbers if number in self._batches}
        for number, batch in left.items():
            batch.give_up(self._plans.place_of(number))
        for number, batch in left.items():
            self._give_places(number, batch.resolve())

    def _give_places(self, number: int, rows: Mapping[int, Row | None]) -> None:
        """Begin the groups at some places of a group's step with other rows, or leave them out."""
        first = number - self._plans.place_of(number)
        num_spared = self._plans.of_step(self._plans.step_of(number)).num_spared - sum(row is not None for row in rows.values())
        for place, row in rows.items():
            self._collectors.replace(first + place, row, num_spared)
            if row is None:
                self._count_begun(self._batches.pop(first + place))
            else:
                num_spared += 1

    def _count_begun(self, batch: StepBatch) -> None:
        """A group has begun, or is left out: the others of its step may have waited for it alone."""
        batch.num_left -= 1
        if batch.num_left == 0:
            self._collectors.go_on(batch.groups)
