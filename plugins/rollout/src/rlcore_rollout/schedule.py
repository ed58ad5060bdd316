"""Decides which groups may begin, which make the next step's batch, and which are too old: data and rules alone."""

from collections import Counter
from collections.abc import Collection
from typing import Literal

from attrs import define, field, frozen

from rlcore.spi import RewardError


@frozen(kw_only=True)
class SchedulePolicy:
    """The rules of a schedule."""

    groups_per_step: int
    num_steps: int
    """Steps of the whole run: nothing begins that no step would train on."""
    max_staleness: int = 0
    """Steps that may be trained between the weights which a group begins with and the last step which trains on it; at least
    `reuse` - 1."""
    reuse: int = 1
    """Steps that train on each batch, one after another. The first of them is number 1, 1 + reuse, 1 + 2 * reuse, …"""
    on_stale: Literal["wait", "drop", "rescore"] = "wait"
    num_extra: int = 0
    """Groups that run beyond those which steps need, so that a step need not wait for its slowest."""
    max_refills: int | None = None
    """Groups without a signal that each step may replace by others; None keeps them."""

    @property
    def is_synchronous(self) -> bool:
        """Return whether each step trains on the very groups that begin with its weights."""
        return not (self.max_staleness or self.num_extra or self.max_refills is not None)

    @property
    def starts_together(self) -> bool:
        """Return whether the groups of a step begin together. A sample's log-probabilities are those of its prompt, seed and
        weights, but for rounding, which may depend on what runs beside it: where a step waits for all, the order in which
        environments begin is to change nothing at all."""
        return not (self.batches_ahead or self.num_extra)

    @property
    def carries_samples(self) -> bool:
        """Return whether a later step may train on samples of the present weights, so that an interrupt has to keep them."""
        return self.max_staleness > 0

    @property
    def first_staleness(self) -> int:
        """The `max_staleness` of the first step that trains on a batch: the last one is within the bound, too."""
        return self.max_staleness - (self.reuse - 1)

    @property
    def batches_ahead(self) -> int:
        """Batches that may begin before the weights of the steps that train on them."""
        return self.first_staleness // self.reuse

    def begins_batch(self, trained: int) -> bool:
        """Return whether the next step takes a new batch, where `trained` steps were trained."""
        return trained % self.reuse == 0

    def oldest_within_bound(self, trained: int) -> int:
        """The step that the oldest weights began which a group may be of, where `trained` steps were trained."""
        return trained - self.max_staleness

    def is_stale(self, begun: int, trained: int) -> bool:
        """Return whether a group is too old for the next batch, if it began when `begun` steps were trained."""
        return begun < trained + -trained % self.reuse - self.first_staleness

    def oldest_unscored(self, trained: int) -> int:
        """The step that the oldest weights began whose tokens keep the generator's log-probabilities; -1 where all do."""
        return self.oldest_within_bound(trained) if self.on_stale == "rescore" else -1

    @property
    def capacity(self) -> int:
        """Groups that are open at once: begun, and not yet trained on."""
        return (self.batches_ahead + 1) * self.groups_per_step + self.num_extra


@define(kw_only=True)
class Position:
    """The position of a schedule, as a checkpoint keeps it."""

    next_number: int = 0
    """The number of the group that begins next: the position in the data."""
    trained: int = 0
    """Steps that were trained."""
    running: dict[int, int] = field(factory=dict)
    """Groups that run, each with the number of steps that were trained when it began."""
    complete: dict[int, int] = field(factory=dict)
    """Groups that have ended and wait for a step, likewise."""
    reused: dict[int, int] = field(factory=dict)
    """Groups of the batch that the last step trained on and the next one trains on again, likewise."""
    dropped: list[int] = field(factory=list)
    """Groups that were given up since a batch was taken, being too old."""
    refilled: list[int] = field(factory=list)
    """Groups that were replaced since then, having no signal."""


class Schedule:
    """The groups of a run, by number. Group n reads the row that is n-th in the data's order.

    A step trains on the oldest complete groups, and the `reuse` - 1 steps behind it train on the same ones. With `on_stale`
    "wait" it takes no group while that would leave more of the older ones than the steps until their bound can train on, so
    that each group is trained on within its bound. With "drop" a group that no later step may train on is given up; with
    "rescore" it is trained on all the same.

    No method blocks, and none depends on time: what happens follows from the order of the calls.
    """

    def __init__(self, policy: SchedulePolicy, position: Position | None = None) -> None:
        """At a position, which is the schedule's from now on. One of other rules may hold more groups than these, or older."""
        self.policy = policy
        self._at = Position() if position is None else position
        self._training: dict[int, int] = {} if self.policy.begins_batch(self.trained) else dict(self._at.reused)
        """Groups of the batch that was taken and is not yet trained on, or is to be once more."""
        self._dropped: list[int] = []
        """Groups that were given up before that batch, and behind the one before it; empty where none was taken."""
        self._refilled: list[int] = []
        """Groups that were replaced then, likewise."""
        self._drop_stale()

    @property
    def trained(self) -> int:
        """Steps that were trained."""
        return self._at.trained

    @property
    def next_number(self) -> int:
        """The number of the group that begins next."""
        return self._at.next_number

    @property
    def running(self) -> Collection[int]:
        """The groups that run."""
        return self._at.running.keys()

    @property
    def num_complete(self) -> int:
        """Groups that have ended and wait for a step."""
        return len(self._at.complete)

    @property
    def open_groups(self) -> list[int]:
        """The groups that run, those that have ended and wait for a step, and those that the next step trains on again."""
        return [*self._at.running, *self._at.complete, *self._training]

    @property
    def num_open(self) -> int:
        """Return the number of open groups."""
        return len(self._at.running) + len(self._at.complete)

    @property
    def training(self) -> Collection[int]:
        """The groups of the batch that was taken and is not yet trained on."""
        return self._training.keys()

    @property
    def reuses(self) -> bool:
        """Return whether the next step trains on the groups of the last one."""
        return bool(self._training) and not self.policy.begins_batch(self.trained)

    @property
    def dropped(self) -> list[int]:
        """Groups that were given up since the batch before, being too old: until the next batch, or until the one that was
        taken."""
        return self._dropped if self._training else self._at.dropped

    @property
    def refilled(self) -> list[int]:
        """Groups that were replaced then, having no signal."""
        return self._refilled if self._training else self._at.refilled

    def began(self, number: int) -> int:
        """Return how many steps were trained when a group of that batch began."""
        return self._training[number]

    @property
    def is_stuck(self) -> bool:
        """Return whether no batch can come, whatever happens: nothing runs, and what there is makes none."""
        return not (self._at.running or self._training or self.can_take())

    def position(self) -> Position:
        """Return its position. A batch that is taken and not trained on counts as complete, so that nothing of it is lost."""
        at, reuses = self._at, self.reuses
        return Position(
            next_number=at.next_number,
            trained=at.trained,
            running=dict(at.running),
            complete=dict(at.complete) if reuses else at.complete | self._training,
            reused=dict(self._training) if reuses else {},
            dropped=[*self._dropped, *at.dropped],
            refilled=[*self._refilled, *at.refilled],
        )

    def admit(self) -> list[int]:
        """The groups that begin now."""
        policy, at = self.policy, self._at
        if self.reuses and policy.is_stale(at.trained, at.trained):
            return []  # the next batch begins with younger weights
        num_batches = -(-policy.num_steps // policy.reuse) - at.trained // policy.reuse  # the one in training among them
        num_wanted = num_batches * policy.groups_per_step + policy.num_extra
        num_begun = len(at.running) + len(at.complete) + len(self._training)
        begun = list(range(at.next_number, at.next_number + max(0, min(policy.capacity, num_wanted) - num_begun)))
        at.next_number += len(begun)
        at.running.update(dict.fromkeys(begun, at.trained))
        return begun

    def restart(self, number: int) -> None:
        """An open group has begun again, with the present weights."""
        self._at.complete.pop(number, None)
        if self._training.pop(number, None) is not None:  # the others wait until the batch is whole again
            self._at.complete |= self._training
            self._training = {}
        self._at.running[number] = self._at.trained

    def end(self, number: int, *, has_signal: bool) -> bool:
        """A group has ended. False where it is given up and another takes its place, since nothing can be learned from it;
        RewardError where a step has given up too many."""
        at = self._at
        begun = at.running.pop(number)
        if has_signal or self.policy.max_refills is None:
            at.complete[number] = begun
            return True
        at.refilled.append(number)
        if len(at.refilled) > self.policy.max_refills:
            raise RewardError(
                f"step {at.trained + 1}: the rewards of the samples that count were all equal, or none counts, in each of "
                f"{len(at.refilled)} groups that were replaced, and {len(at.complete)} of {self.policy.groups_per_step} groups "
                f"have a signal; expected at most {self.policy.max_refills} replaced groups (rollout.max_refill_ratio). Make "
                "the tasks easier or harder, raise rollout.samples_per_prompt, rollout.max_response_tokens or that ratio, or "
                "keep such groups (rollout.dynamic_sampling)"
            )
        return False

    def can_take(self) -> bool:
        """Return whether the next step's batch is there."""
        return self.reuses or bool(self._next())

    def take(self) -> list[int]:
        """The groups of the next step, ascending; they stay open until `train`. Empty where the batch is not there yet."""
        if self.reuses:
            return sorted(self._training) if self.can_take() else []
        at, chosen = self._at, self._next()
        for number in chosen:
            self._training[number] = at.complete.pop(number)
        if chosen:  # what is given up while it is trained on counts for the next
            self._dropped, self._refilled, at.dropped, at.refilled = at.dropped, at.refilled, [], []
        return sorted(chosen)

    def metrics(self) -> dict[str, float]:
        """The figures of the batch that was taken. Staleness is the number of steps that were trained between the weights
        which a group began with and the step which trains on it."""
        staleness = [self._at.trained - begun for begun in self._training.values()]
        return {
            "async/staleness_mean": sum(staleness) / len(staleness),
            "async/staleness_max": float(max(staleness)),
            "async/groups_dropped": float(len(self.dropped)),
            "async/groups_refilled": float(len(self.refilled)),
            "async/groups_open": float(self.num_open),
        }

    def train(self) -> list[int]:
        """The batch was trained on. Returns the groups that are open no longer: its own, and those that are given up since they
        would be too old for the next step."""
        at, closed = self._at, list[int]()
        at.trained += 1
        if self.policy.begins_batch(at.trained):
            closed, self._training = list(self._training), {}
        self._dropped, self._refilled = [], []
        return closed + self._drop_stale()

    def _drop_stale(self) -> list[int]:
        """Give up the groups that no later step may train on."""
        at, policy = self._at, self.policy
        dropped: list[int] = []
        if policy.on_stale == "drop":
            for groups in (at.running, at.complete):
                stale = [number for number, begun in groups.items() if policy.is_stale(begun, at.trained)]
                for number in stale:
                    del groups[number]
                dropped += stale
        at.dropped += dropped
        return dropped

    def _next(self) -> list[int]:
        at, policy = self._at, self.policy
        num_groups = policy.groups_per_step
        if self._training or len(at.complete) < num_groups:
            return []  # before anything is counted: it is asked at the end of each group
        if policy.on_stale == "wait":
            complete, running = Counter(at.complete.values()), Counter(at.running.values())
            for later in range(policy.batches_ahead + 1):
                # What has to be trained on by the batch that is so much later, and what those after this one can take of it.
                next_batch = at.trained - at.trained % policy.reuse + (later + 1) * policy.reuse
                last = next_batch - policy.first_staleness - 1
                num_complete, num_running = (
                    sum(number for begun, number in groups.items() if begun <= last) for groups in (complete, running)
                )
                num_due = min(num_complete + num_running - later * num_groups, num_groups)  # more only at another's position
                if min(num_complete, num_groups) < num_due:
                    return []
        oldest = sorted((begun, number) for number, begun in at.complete.items())
        return [number for _, number in oldest[:num_groups]]
