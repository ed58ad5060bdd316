"""Rows and seeds of a step's groups, and the replacement of rows whose prompt is too long."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
from attrs import define, field, frozen

from rlcore.spi import DataError, Row


@frozen(kw_only=True, eq=False)
class PromptLimit:
    """How long a prompt may be that only its episode's beginning shows."""

    max_tokens: int
    drops: bool
    """True where longer ones are left out; else they are an error."""
    key: str
    """The data set's section of the recipe."""
    option: str = "rollout.max_prompt_tokens"
    """The option that sets the limit."""


class Draws:
    """The random choices of P groups of G samples: a function of the key, whatever becomes of any of them."""

    def __init__(self, key: Sequence[int], num_groups: int, group_size: int) -> None:
        """`key` is one of numpy's SeedSequence."""
        self.key = tuple(key)
        self._random = np.random.default_rng(list(key))
        self._shape = (num_groups, group_size)
        self.reset_seeds: list[int] = self._random.integers(0, 2**31, num_groups).tolist()
        """[P]: those that environments begin with."""
        self._turns: list[list[list[int]]] = []
        """[P][G] for each turn: numbers of Python's own, since they are taken one by one."""

    def seed(self, turn: int, place: int, member: int) -> int:
        """The seed of a turn, drawn for all samples at once. What becomes of an episode, such as that it fails on a busy
        machine, then changes no sample of another."""
        while len(self._turns) <= turn:
            self._turns.append(self._random.integers(0, 2**63 - 1, self._shape, dtype=np.int64).tolist())
        return self._turns[turn][place][member]


@define(kw_only=True, eq=False)
class StepPlan:
    """The rows and seeds that the P groups of a step begin with."""

    rows: Sequence[Row]
    """[P]"""
    draws: Draws
    numbers: Sequence[int] = ()
    """[P]: the number of each row in its data; empty where nobody asks."""
    spare: Iterator[Row] = field(factory=lambda: iter(()))
    """Rows that take the places of those whose prompts are too long."""
    num_spared: int = 0
    """How many of them were taken."""

    def next_spare(self) -> Row | None:
        """The next row to take a place; None where none is left."""
        row = next(self.spare, None)
        self.num_spared += row is not None
        return row

    def skip_spares(self, number: int) -> None:
        """Pass over rows that were taken before."""
        while self.num_spared < number and self.next_spare() is not None:
            pass


class StepPlans:
    """The plans of the steps whose groups are open. Group n is the n-th of all, as many a step; its samples are numbered on."""

    def __init__(self, plan_of: Callable[[int], StepPlan], groups_per_step: int, group_size: int) -> None:
        """`plan_of` returns the plan of a step; steps count from 0."""
        self._plan_of = plan_of
        self._groups_per_step = groups_per_step
        self._group_size = group_size
        self._plans: dict[int, StepPlan] = {}

    def of_step(self, step: int) -> StepPlan:
        """The plan of a step."""
        if step not in self._plans:
            self._plans[step] = self._plan_of(step)
        return self._plans[step]

    def row(self, group: int) -> Row:
        """The row of a group, unless another took its place."""
        return self.of_step(self.step_of(group)).rows[self.place_of(group)]

    def row_number(self, group: int) -> int | None:
        """The number of a group's row in its data, unless another took its place; None where it is unknown."""
        numbers = self.of_step(self.step_of(group)).numbers
        return int(numbers[self.place_of(group)]) if len(numbers) else None

    def reset_seed(self, group: int) -> int:
        """The seed with which the environment begins a group."""
        return self.of_step(self.step_of(group)).draws.reset_seeds[self.place_of(group)]

    def spare(self, step: int, number: int) -> Row | None:
        """The row with this number among those behind a step's, from 0; None where there are fewer."""
        return next(islice(self._plan_of(step).spare, number, None), None)

    def step_of(self, group: int) -> int:
        """The step that a group belongs to by its number, whichever trains on it."""
        return group // self._groups_per_step

    def place_of(self, group: int) -> int:
        """Its place among the groups of that step."""
        return group % self._groups_per_step

    def seed(self, sample: int, turn: int) -> int:
        """The seed of a sample's turn."""
        group, member = divmod(sample, self._group_size)
        step, place = divmod(group, self._groups_per_step)
        plan = self._plans.get(step) or self.of_step(step)
        return plan.draws.seed(turn, place, member)

    def keep(self, groups: Iterable[int]) -> None:
        """Forget all plans but those of some groups."""
        steps = {self.step_of(group) for group in groups}
        self._plans = {step: plan for step, plan in self._plans.items() if step in steps}

    def spared(self) -> dict[int, int]:
        """Return the number of rows that took the places of others, by step."""
        return {step: plan.num_spared for step, plan in self._plans.items() if plan.num_spared}


@define(kw_only=True, eq=False)
class StepBatch:
    """Groups of one step that begin at the same moment. Rows take the places of those with long prompts in the groups' order,
    once it is known which are: whichever environment is the first to answer changes nothing."""

    plan: StepPlan
    limit: PromptLimit
    num_unknown: int
    """Groups of which it is not known yet whether their prompt is too long."""
    groups: Sequence[int] = ()
    """The groups whose first turns are asked for together, by number; none where each is asked for as soon as its prompt is
    known."""
    num_left: int = field(init=False)
    """The number of these that have not begun."""
    num_long: int = 0
    has_begun: bool = False
    """True where some group has a prompt within the limit."""
    _long: dict[int, tuple[Row, int]] = field(factory=dict)
    """By their place: the row, and the tokens of its prompt."""

    @num_left.default
    def _all(self) -> int:
        return len(self.groups)

    def begun(self) -> Mapping[int, Row | None]:
        """A group's prompt is within the limit, or its environment failed. Returns as `too_long`."""
        self.has_begun = True
        self.num_unknown -= 1
        return self.resolve()

    def too_long(self, place: int, row: Row, num_tokens: int) -> Mapping[int, Row | None]:
        """A row's prompt is over the limit. Returns, once all are known, the rows that take the places of such ones, None where
        none is left. DataError where long prompts are an error, or no prompt is within the limit."""
        self._long[place] = (row, num_tokens)
        self.num_unknown -= 1
        return self.resolve()

    def give_up(self, place: int) -> None:
        """A group is open no longer: no row takes its place, and none waits for it. `resolve` returns who has waited."""
        self.num_unknown -= self._long.pop(place, None) is None

    def resolve(self) -> Mapping[int, Row | None]:
        """As `too_long`."""
        if self.num_unknown or not self._long:
            return {}
        self.num_long += len(self._long)
        places = sorted(self._long)
        spares = {place: self.plan.next_spare() if self.limit.drops else None for place in places}
        self.num_unknown = sum(row is not None for row in spares.values())
        if not (self.limit.drops and (self.has_begun or self.num_unknown)):
            raise self._error()
        self._long = {}
        return spares

    def _error(self) -> DataError:
        row, num_tokens = max(self._long.values(), key=lambda one: one[1])
        found = (
            f"the environment's prompt for row {row!r:.200} has {num_tokens} tokens; expected at most "
            f"{self.limit.max_tokens} ({self.limit.option})"
        )
        key = self.limit.key
        if self.limit.drops:
            return DataError(f"{key}: all {self.num_long} prompts asked for are over the limit: {found}")
        return DataError(f'{key}: {found}. Raise it, or leave such rows out with {key}.on_long_prompt = "drop"')


def seed_after(seed: int, num_said: int) -> int:
    """The seed of the rest of a turn. A generator may draw a request's random numbers from its seed alone: the same seed would
    repeat, after the cut, those that chose the tokens before it."""
    return (
        seed if not num_said else int(np.random.SeedSequence([seed, num_said]).generate_state(1, np.uint64)[0] >> np.uint64(1))
    )
