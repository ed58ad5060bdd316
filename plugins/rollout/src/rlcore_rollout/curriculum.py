"""A curriculum: prompts come by what was learned of them when they were last asked, and high levels later."""

import threading
from collections.abc import Mapping

import numpy as np
from attrs import frozen

from rlcore.run.data.prompt_stream import PromptOrder, RandomPurpose
from rlcore.spi import CheckpointError
from rlcore.spi.arrays import BoolArray, Int64Array
from rlcore_rollout.group_work import GroupRewards
from rlcore_rollout.levels import Levels, LevelState
from rlcore_rollout.prompt_weights import UNIFORM_SHARE, Float64Array, PromptOutcomes, PromptWeights, rates


@frozen(kw_only=True, eq=False)
class CurriculumState:
    """The state of a curriculum in a checkpoint."""

    position: int
    """The place in the order behind the last row that was looked at."""
    no_variance: BoolArray
    """bool [num_rows]: whether the rewards of a row's last samples were all equal."""
    planned: Mapping[int, tuple[Int64Array, int]]
    """The rows of each step that may still be asked for, with the place behind them."""
    levels: LevelState | None = None
    """None where rows of all levels come."""
    outcomes: PromptOutcomes | None = None
    """None where rows come by no weights."""
    unrecorded: tuple[int, ...] = ()
    """The steps of `planned` that no trace has yet."""


class Curriculum:
    """The rows of steps by an order, in which those whose last samples had equal rewards, or that have little weight, are
    passed over but for a share.

    A step's rows are chosen when they are first asked for, by what is known then, and stay what they are. Which rows are passed
    over follows from that, the seed and the step.
    """

    def __init__(
        self, order: PromptOrder, weight: float, levels: Levels | None = None, weights: PromptWeights | None = None
    ) -> None:
        """`weight` is that share of rows with equal rewards, above 0. `levels` has those of the order's rows; None where all
        come. `weights` weighs rows by the outcomes of their groups."""
        self._order = order
        self._weight = weight
        self._levels = levels
        self._weights = weights
        self.recorded: Mapping[int, tuple[Int64Array, int]] = {}
        """The rows of steps of a recorded run, as CurriculumState.planned."""
        self._lock = threading.Lock()
        """Rows are chosen where groups begin, which may be while another thread trains."""
        self.begin(0, None)

    def begin(self, step: int, saved: CurriculumState | None) -> None:
        """Begin anew at a step, or from what `state` returned. CheckpointError where that is of other rows."""
        num_rows = self._order.num_rows
        if saved is None:
            nothing = np.zeros(num_rows, np.bool_)
            saved = CurriculumState(position=step * self._order.batch_size, no_variance=nothing, planned={})
        if len(saved.no_variance) != num_rows:
            raise CheckpointError(
                f"the checkpoint knows of {len(saved.no_variance)} prompts; expected {num_rows}, those of the data"
            )
        self._position, self._no_variance = saved.position, saved.no_variance.copy()
        self._planned = dict(saved.planned)
        self._unrecorded = set(saved.unrecorded)
        self._outcomes = saved.outcomes or PromptOutcomes.empty(num_rows)
        self._outcomes.require(num_rows)
        if self._levels is not None:
            self._levels.begin(saved.levels)
        if any(len(rows) != self._order.batch_size for rows, _ in self._planned.values()):  # steps are of another number now
            self._position, self._planned = step * self._order.batch_size, {}

    def state(self) -> CurriculumState:
        """Return the state to begin from later."""
        with self._lock:
            return CurriculumState(
                position=self._position,
                no_variance=self._no_variance.copy(),
                planned=dict(self._planned),
                levels=None if self._levels is None else self._levels.state(),
                outcomes=None if self._weights is None else self._outcomes,
                unrecorded=tuple(sorted(self._unrecorded & self._planned.keys())),
            )

    @property
    def num_without_variance(self) -> int:
        """Rows that come less often."""
        return int(self._no_variance.sum())

    def metrics(self) -> dict[str, float]:
        """The figures of a step."""
        found = {"data/zero_variance_prompts": float(self.num_without_variance)}
        if self._weights is not None:
            of_rows = self._rates()
            found |= {
                "data/prompts_seen": float((self._outcomes.num_groups > 0).sum()),
                "data/rate_mean": float(of_rows.mean()),
            }
        return found if self._levels is None else found | {"data/level": float(self._levels.level)}

    def take_plans(self) -> dict[int, tuple[Int64Array, int]]:
        """The rows of the steps that were chosen since the last call, as CurriculumState.planned."""
        with self._lock:
            taken, self._unrecorded = self._unrecorded, set()
            return {step: self._planned[step] for step in sorted(taken & self._planned.keys())}

    def indices(self, step: int) -> Int64Array:
        """int64 [batch_size]: row numbers of a step; steps count from 0, and are first asked for in order."""
        return self._plan(step)[0]

    def following(self, step: int) -> Int64Array:
        """int64 [num_rows]: all rows as they come behind a step's, whether anything is learned from them or not; those that
        wait for their level last."""
        rows, end = self._plan(step)
        others = self._order.others(end, rows)
        is_open = self._is_open(others)
        return np.concatenate([others[is_open], others[~is_open]])

    def learn(
        self,
        has_signal: Mapping[int, bool],
        success: Mapping[int, float],
        rewards: Mapping[int, GroupRewards] | None = None,
    ) -> None:
        """Take note of groups, by number: whether the rewards of their samples differed, the share that solved it, and the
        rewards."""
        with self._lock:
            if self._levels is not None:
                for number, share in sorted(success.items()):
                    self._levels.learn(self._row_of(number), share)
            for number, differs in sorted(has_signal.items()):
                self._no_variance[self._row_of(number)] = not differs
            if rewards and self._weights is not None:
                found = [(self._row_of(number), *rewards[number]) for number in sorted(rewards)]
                self._outcomes = self._outcomes.with_groups(found)

    def forget_before(self, step: int) -> None:
        """No step before this one is asked for again."""
        with self._lock:
            self._planned = {one: planned for one, planned in self._planned.items() if one >= step}

    def _row_of(self, number: int) -> int:
        """The row of a group."""
        step, place = divmod(number, self._order.batch_size)
        return int(self._planned[step][0][place])

    def _rates(self) -> Float64Array:
        """float64 [num_rows]: how often each row is taken where the order comes to it."""
        if self._weights is not None:
            return rates(self._weights, self._outcomes)
        return np.where(self._no_variance, self._weight, 1.0)

    def _is_open(self, rows: Int64Array) -> BoolArray:
        return np.ones(len(rows), np.bool_) if self._levels is None else self._levels.is_open(rows)

    def _plan(self, step: int) -> tuple[Int64Array, int]:
        with self._lock:
            if step not in self._planned:
                self._planned[step] = self.recorded.get(step) or self._chosen(step)
                self._unrecorded.add(step)
                self._position = self._planned[step][1]
            return self._planned[step]

    def _chosen(self, step: int) -> tuple[Int64Array, int]:
        """The rows of a step, and the place behind them. Once a whole epoch was looked at, or by weights so many that each row
        is expected to come, the rest is taken as it comes."""
        order, size, of_rows = self._order, self._order.batch_size, self._rates()
        most = order.num_rows * (1 if self._weights is None else round(1 / UNIFORM_SHARE))
        random = np.random.default_rng([order.seed, RandomPurpose.CURRICULUM, step])
        chosen, num_chosen, position = [np.zeros(0, np.int64)], 0, self._position
        while num_chosen < size:
            rows = order.rows(position, position + size)
            is_taken = random.random(size) < of_rows[rows]
            if position - self._position >= most:
                is_taken[:] = True
            is_taken &= self._is_open(rows)
            places = np.flatnonzero(is_taken)[: size - num_chosen]
            chosen.append(rows[places])
            num_chosen += len(places)
            position += int(places[-1]) + 1 if num_chosen == size else size
        return np.concatenate(chosen), position
