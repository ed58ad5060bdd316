"""Collects groups: begins them, takes them to their end beside the generator, and packs them into columns."""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

from rlcore.run.protocols import CollectedRollouts
from rlcore.spi import EpisodeFailure, Row, WorkerError
from rlcore.spi.execution import GeneratorGroup
from rlcore_rollout.background_stream import BackgroundStream
from rlcore_rollout.collectors import Collectors, GroupEvents, MayGoOn
from rlcore_rollout.environment_calls import POLL_S, EnvironmentCalls
from rlcore_rollout.environment_runner import EpisodeRunner
from rlcore_rollout.failures import LeftOut, Outcome
from rlcore_rollout.group_work import GroupResult, GroupT, GroupWork
from rlcore_rollout.loop_work import LoopWork
from rlcore_rollout.packed_groups import PackedGroups, joined
from rlcore_rollout.serialization import dumps, load_saved
from rlcore_rollout.trace_records import GroupRecord

T = TypeVar("T")
WORKER_DIED = EpisodeFailure(kind="infrastructure", reason="a worker died that generated the sample")


class GroupCollector(Collectors, Generic[GroupT]):
    """Groups under way in this process.

    The generator streams in the thread that calls `generate`, or in one of its own; the environment answers on an event loop.
    All that is known of groups is looked at and changed on that event loop alone, where there is one at work.
    """

    def __init__(
        self,
        *,
        work: GroupWork[GroupT],
        runner: EpisodeRunner,
        pack: Callable[[Sequence[GroupT]], PackedGroups],
        capacity: int,
        starts_together: bool = False,
        overlaps: bool = False,
    ) -> None:
        """`work` is what its groups do, of which at most `capacity` are open; `pack` makes columns of those that have ended.
        `starts_together` is the schedule's. With `overlaps` the generator goes on in a thread of its own when a batch is there,
        until `pause`."""
        self.work = work
        self.groups: dict[int, GroupT] = {}
        """The open groups."""
        self._running: set[int] = set()
        """The open groups that have not ended."""
        self._runner = runner
        self._pack = pack
        self._num_tasks = min(runner.max_concurrent, capacity * work.group_size)
        self._together = starts_together
        self._loop = LoopWork(runner, self._begin, self.close, work.now)
        self._wake_up = threading.Event()
        """Set where a batch may be there, or the stream in the background has ended."""
        self._background = BackgroundStream(work.requests, self._wake_up.set) if overlaps else None
        self._events: GroupEvents

    def listen(self, events: GroupEvents) -> None:
        """See Collectors."""
        self._events = events

    # In the thread that generates.

    def begin_step(self) -> None:
        """See Collectors."""
        self.work.count.begin()

    def generate(
        self, generator: GeneratorGroup, weight_version: int, is_complete: Callable[[], bool], may_go_on: MayGoOn
    ) -> None:
        """See Collectors."""
        if self._background is not None:
            self._wait(generator, weight_version, is_complete, may_go_on)
        elif not self._loop.call(is_complete):
            self._stream(generator, weight_version, may_go_on)

    @property
    def is_generating(self) -> bool:
        """See Collectors."""
        return self._background is not None and self._background.has_begun

    def pause(self) -> None:
        """See Collectors."""
        if self._background is None:
            return
        try:
            with self._stopped_behind():
                self._background.end()
        except Exception as error:
            if not self._background.is_usable:
                raise
            self._loop.keep(error)
        self._loop.keep(self.work.requests.failure())

    def idle_s(self) -> float:
        """See Collectors."""
        return self.work.count.idle_s()

    def busy_s(self) -> float:
        """See Collectors."""
        return self.work.count.busy_s()

    @property
    def has_failed(self) -> bool:
        """See Collectors."""
        return self._loop.has_failed

    def raise_failure(self) -> None:
        """See Collectors."""
        self._loop.raise_failure()

    def between(self, function: Callable[[], T]) -> T:
        """See Collectors."""
        return self._loop.between(function)

    def call(self, function: Callable[[], T]) -> T:
        """See Collectors."""
        return self._loop.call(function)

    def packed(self, numbers: Sequence[int]) -> CollectedRollouts:
        """See Collectors. The event loop does not wait: nothing changes in groups that have ended."""
        groups = self._loop.between(lambda: [self.groups[number] for number in numbers])
        return joined([self._pack(groups)], [numbers])

    @contextmanager
    def still(self) -> Iterator[None]:
        """See Collectors."""
        task_pool = self.work.task_pool
        self._loop.between(task_pool.hold)
        try:
            # Work that has failed may leave calls behind that never end.
            while self.work.ends_without_samples and self._loop.between(lambda: self._loop.is_at_work and task_pool.is_at_work):
                self._loop.poll(POLL_S)
            yield
        finally:
            self._loop.between(task_pool.release)

    def close(self) -> None:
        """See Collectors."""
        try:
            if self._background is not None:
                with suppress(Exception):  # what ends the run is known by now, or there is nothing left to generate
                    self._background.end()
        finally:
            self.work.end()
            self._loop.cancel()
            self.work.close()

    def _stream(self, generator: GeneratorGroup, weight_version: int, may_go_on: MayGoOn) -> None:
        """Generate in this thread until the batch is there."""
        self._begin_stream(weight_version, may_go_on)
        with self._stopped_behind():
            generator.stream(self.work.requests, weight_version)
        self._loop.keep(self.work.requests.failure())
        self._loop.raise_failure()

    @contextmanager
    def _stopped_behind(self) -> Iterator[None]:
        """The stream has ended behind the block. What a worker that died had taken is asked for again."""
        try:
            yield
        except WorkerError:
            num_lost = self.work.requests.requeue()
            if num_lost:
                self._events.left_out(LeftOut(outcome="asked again", row=None, endings={WORKER_DIED: num_lost}))
            raise
        finally:
            self.work.count.generating(False)

    def _wait(
        self, generator: GeneratorGroup, weight_version: int, is_complete: Callable[[], bool], may_go_on: MayGoOn
    ) -> None:
        """Generate in the background; wait until the batch is there."""
        self.begin_stream(generator, weight_version)
        while may_go_on() and not self._loop.call(is_complete):
            if self.has_stopped:
                self.pause()
                self._loop.raise_failure()
                return
            self._wake_up.wait(POLL_S)
            self._wake_up.clear()

    def begin_stream(self, generator: GeneratorGroup, weight_version: int) -> None:
        """Begin a stream in the background, unless one has begun."""
        assert self._background is not None, "it overlaps"
        if not self._background.has_begun:
            self._begin_stream(weight_version, lambda: True)
            self._background.begin(generator, weight_version)
        self._drive()

    def watch(self) -> None:
        """Raise what has ended the work, or the stream in the background."""
        self._loop.poll(0.0)
        if self.has_stopped:
            self.pause()
        self._loop.raise_failure()

    @property
    def has_stopped(self) -> bool:
        """Return whether the stream in the background has ended by itself, or by an error that `pause` finds."""
        return self.is_generating and (self._background_failed or self.work.requests.has_ended)

    @property
    def _background_failed(self) -> bool:
        return self._background is not None and self._background.has_failed

    def _begin_stream(self, weight_version: int, may_go_on: MayGoOn) -> None:
        self._drive()
        self.work.requests.begin(weight_version, lambda: self._loop.watch() and may_go_on())
        self.work.count.generating(True)
        self._loop.call(self._look)  # the batch may have come before the stream of the queue began

    def _drive(self) -> None:
        """Have the event loop work on the groups that run."""
        self.work.open()
        self._loop.drive()

    # On the event loop, or in another thread while none is at work.

    def begin(self, numbers: Sequence[int]) -> Sequence[int]:
        """See Collectors."""
        begun = [self.work.new_group(number) for number in numbers]
        self._open(begun, numbers)
        if self._loop.is_at_work:
            self._start(begun)
        return [group.number for group in begun if self.work.begins(group)]

    def replace(self, number: int, row: Row | None, spare: int) -> None:
        """See Collectors."""
        self.work.replace(self.groups[number], row, spare)

    def go_on(self, numbers: Collection[int]) -> None:
        """See Collectors."""
        self.work.go_on(numbers)

    def forget(self, numbers: Collection[int], outcome: Outcome | None) -> None:
        """See Collectors."""
        groups = [self.groups.pop(number) for number in numbers]
        self._running.difference_update(numbers)
        if outcome is not None:
            for group in groups:
                endings = Counter(group.endings())
                self._events.left_out(LeftOut(outcome=outcome, row=self.work.row_number(group), endings=endings))
        self.work.forget(groups)

    def restart(self, numbers: Collection[int]) -> list[int]:
        """See Collectors."""
        is_at_work = self._loop.is_at_work
        return [number for number in numbers if self.work.restart(self.groups[number], is_at_work=is_at_work)]

    def request_complete(self) -> None:
        """See Collectors."""
        self._wake_up.set()
        if self._background is None:
            self.work.requests.end()

    def part(self, numbers: Sequence[int]) -> PackedGroups:
        """Return the columns of groups that have ended."""
        return self._pack([self.groups[number] for number in numbers])

    def records(self, numbers: Sequence[int]) -> list[GroupRecord] | None:
        """See Collectors."""
        return self.work.records([self.groups[number] for number in numbers])

    def saved(self, numbers: Sequence[int]) -> tuple[dict[int, bytes], list[str]]:
        """See Collectors."""
        kept, errors = {}, []
        for number in numbers:
            try:
                if (state := self.work.saved(self.groups[number])) is not None:
                    kept[number] = dumps(state)
            except Exception as error:  # whatever an environment's state raises
                errors.append(f"{type(error).__name__}: {error}")
        return kept, errors

    def resume(self, saved: Mapping[int, bytes], running: Collection[int]) -> dict[int, GroupResult | None]:
        """See Collectors."""
        found = {number: self.work.resumed(load_saved(state)) for number, state in saved.items()}
        resumed = {number: group for number, group in found.items() if group is not None}
        self._open(list(resumed.values()), running)
        return {number: None if number in running else self.work.result(group) for number, group in resumed.items()}

    def begins(self, number: int) -> bool:
        """See Collectors."""
        return self.work.begins(self.groups[number])

    async def _begin(self, calls: EnvironmentCalls) -> None:
        """Go on with every group that has not ended, from where it is, and with those that begin."""
        work = self.work
        work.begin(calls, self._on_ended, self._look, self._events)
        self._loop.at_work()
        self._start([self.groups[number] for number in sorted(self._running)])
        work.take_arrived()
        await work.task_pool.run(calls, self._num_tasks)

    def _open(self, groups: Sequence[GroupT], running: Collection[int]) -> None:
        self.groups |= {group.number: group for group in groups}
        self._running |= self.groups.keys() & set(running)

    def _start(self, groups: Sequence[GroupT]) -> None:
        self.work.start(groups, together=self._together)

    def _on_ended(self, number: int) -> None:
        """An episode of a group has ended."""
        group = self.groups[number]
        if not group.all_ended() or self.work.extend(group):
            return
        group.finish()
        self._running.discard(number)
        self._events.ended(self.work.result(group))
        self._look()

    def _look(self) -> None:
        self.work.request_next([self.groups[number] for number in self._running])
        self._events.look()
