"""Runs groups of episodes, as many as a schedule lets begin, until the next step's batch is there."""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

from rlcore.spi import ContractError, EpisodeFailure, WorkerError
from rlcore.spi.execution import GeneratorGroup
from rlcore_rollout.environment_calls import POLL_S, EnvironmentCalls
from rlcore_rollout.environment_runner import EpisodeRunner
from rlcore_rollout.failures import LeftOut, Outcome
from rlcore_rollout.group_work import GroupRewards, GroupT, GroupWork
from rlcore_rollout.loop_work import LoopWork
from rlcore_rollout.request_queue import RequestQueue
from rlcore_rollout.schedule import Schedule

T = TypeVar("T")
WORKER_DIED = EpisodeFailure(kind="infrastructure", reason="a worker died that generated the sample")


class BackgroundStream:
    """One stream after another over the same queue."""

    def __init__(self, feed: RequestQueue, on_end: Callable[[], None]) -> None:
        """`on_end` is called in the stream's thread once it has ended, for whatever reason."""
        self._requests = feed
        self._on_end = on_end
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._generator: GeneratorGroup | None = None

    @property
    def is_usable(self) -> bool:
        """Return whether another stream may begin: the generator of the last one is in a known state."""
        return self._generator is None or self._generator.is_usable

    @property
    def has_begun(self) -> bool:
        """Return whether a stream has begun that `end` has not ended."""
        return self._thread is not None

    @property
    def has_failed(self) -> bool:
        """Return whether that stream ended by an error, which `end` raises."""
        return self._error is not None

    def begin(self, generator: GeneratorGroup, weight_version: int) -> None:
        """Begin a stream; that of the queue has begun. Returns once the generator is at it, or has failed: an earlier refit
        would bring weights that the stream does not begin with."""
        self._generator = generator
        self._thread = threading.Thread(
            target=self._run, args=(generator, weight_version), name="generation-stream", daemon=True
        )
        self._thread.start()
        self._requests.first_take.wait()

    def end(self) -> None:
        """End the stream, once what has not ended has come back. Raises what it raised."""
        if self._thread is None:
            return
        self._requests.end()
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, generator: GeneratorGroup, weight_version: int) -> None:
        try:
            generator.stream(self._requests, weight_version)
        except BaseException as error:  # which would be lost in this thread
            self._error = error
        self._requests.first_take.set()
        try:
            self._on_end()
        except BaseException as error:
            self._error = self._error or error


class EpisodeRun(Generic[GroupT]):
    """Groups under way.

    The generator streams in the thread that calls `collect`; the environment answers on an event loop of its own. All that is
    known of groups and episodes is looked at and changed on that event loop alone, where there is one at work.
    """

    def __init__(self, *, schedule: Schedule, work: GroupWork[GroupT], runner: EpisodeRunner, overlaps: bool = False) -> None:
        """`work` is what its groups do. With `overlaps` the generator goes on in a thread of its own when a batch is there,
        until `pause`."""
        self.schedule = schedule
        self.work = work
        self._runner = runner
        self._groups: dict[int, GroupT] = {}
        """The open groups."""
        self.replaced: dict[int, GroupRewards] = {}
        """The rewards of groups that were replaced, by number; no rewards of those that say nothing of their rows."""
        self.left_out: list[LeftOut] = []
        """Episodes that no step trains on, since the list was emptied last."""
        self._loop = LoopWork(runner, self._begin, self.close, work.now)
        self._wake_up = threading.Event()
        """Set where a batch may be there, or the stream in the background has ended."""
        self._background = BackgroundStream(work.requests, self._wake_up.set) if overlaps else None

    # In the thread that generates.

    def collect(
        self, generator: GeneratorGroup, weight_version: int, may_go_on: Callable[[], bool] = lambda: True
    ) -> list[GroupT]:
        """Generate until the next step's batch is there, and return its groups; none where `may_go_on` turned False before.

        Raises what ends the run, also where that came since the last batch: what follows a batch fails by itself alone. After a
        WorkerError it can be called again: what was lost is generated once more."""
        self.work.count.begin()
        try:
            self._loop.raise_failure()
            self._loop.call(self._admit)
            if self._background is not None:
                self._wait(self._background, generator, weight_version, may_go_on)
            elif not self._loop.call(self.schedule.can_take):
                self._stream(generator, weight_version, may_go_on)
            groups = self._loop.between(self._take)
            if not groups:
                self._loop.raise_failure()  # else the batch that is there is trained on first
            return groups
        except WorkerError:
            raise
        except BaseException:
            self.close()
            raise

    def train(self) -> None:
        """The last batch was trained on: it is forgotten, and what is too old for the next one."""
        self._loop.between(self._forget_trained)
        if self._background is not None and self._background.has_begun:
            self._loop.between(self._admit)

    @property
    def has_failed(self) -> bool:
        """Return whether something has that the next `collect` raises."""
        return self._loop.has_failed

    def pause(self) -> None:
        """End the stream in the background, if there is one: what has not ended goes on in the next. Raises what it raised
        where the generator cannot be used any more."""
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

    def restart(self) -> None:
        """Begin all episodes once more that have not ended."""
        self._loop.between(self._restart)

    def snapshot(self, make: Callable[[Sequence[GroupT]], T]) -> T:
        """Return the result of `make` for all open groups, none of which changes meanwhile."""
        return self._loop.between(lambda: make([self._groups[number] for number in sorted(self._groups)]))

    def taken(self, make: Callable[[Sequence[GroupT]], T]) -> T:
        """Return the result of `make` for the groups of the batch that was taken, while nothing changes."""
        return self._loop.between(lambda: make([self._groups[number] for number in sorted(self.schedule.training)]))

    def restore(self, groups: Iterable[GroupT]) -> None:
        """Go on with the groups of a snapshot; the schedule is where it was then."""
        self._groups |= {group.number: group for group in groups}

    @contextmanager
    def still(self) -> Iterator[None]:
        """No call of the environment begins within the block, and those that were under way have ended: it may be called
        otherwise, as many times at once as it can work on. Calls that only end with samples wait within the block."""
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
        """End all work, where it is: what is known of groups changes no more when this returns."""
        try:
            if self._background is not None:
                with suppress(Exception):  # what ends the run is known by now, or there is nothing left to generate
                    self._background.end()
        finally:
            self.work.end()
            self._loop.cancel()
            self.work.close()

    def _stream(self, generator: GeneratorGroup, weight_version: int, may_go_on: Callable[[], bool]) -> None:
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
            self.left_out.append(LeftOut(outcome="asked again", row=None, endings=[WORKER_DIED] * num_lost))
            raise
        finally:
            self.work.count.generating(False)

    def _wait(
        self,
        background: BackgroundStream,
        generator: GeneratorGroup,
        weight_version: int,
        may_go_on: Callable[[], bool],
    ) -> None:
        """Generate in the background; wait until the batch is there."""
        if not background.has_begun:
            self._begin_stream(weight_version, lambda: True)
            background.begin(generator, weight_version)
        self._drive()
        while may_go_on() and not self._loop.call(self.schedule.can_take):
            if background.has_failed or self.work.requests.has_ended:
                self.pause()
                self._loop.raise_failure()
                return
            self._wake_up.wait(POLL_S)
            self._wake_up.clear()

    def _begin_stream(self, weight_version: int, may_go_on: Callable[[], bool]) -> None:
        self._drive()
        self.work.requests.begin(weight_version, lambda: self._loop.watch() and may_go_on())
        self.work.count.generating(True)
        self._loop.call(self._look)  # the batch may have come before the stream of the queue began

    def _drive(self) -> None:
        """Have the event loop work on the groups that run."""
        self.work.open()
        self._loop.drive()

    # On the event loop.

    async def _begin(self, calls: EnvironmentCalls) -> None:
        """Go on with every group that has not ended, from where it is, and with those that begin."""
        work, task_pool = self.work, self.work.task_pool
        work.begin(calls, self._on_ended, self._look)
        self._loop.at_work()
        self._start([self._groups[number] for number in sorted(self.schedule.running)])
        work.take_arrived()
        await task_pool.run(calls, min(self._runner.max_concurrent, self.schedule.policy.capacity * work.group_size))

    def _admit(self) -> None:
        """Begin the groups that may."""
        begun = [self.work.new_group(number) for number in self.schedule.admit()]
        self._groups |= {group.number: group for group in begun}
        if self._loop.is_at_work:
            self._start(begun)

    def _start(self, groups: Sequence[GroupT]) -> None:
        self.work.start(groups, together=self.schedule.policy.starts_together)

    def _on_ended(self, number: int) -> None:
        """An episode of a group has ended."""
        group = self._groups[number]
        if not group.all_ended() or self.work.extend(group):
            return
        group.finish()
        counts = self.schedule.policy.max_refills is None or self.work.has_signal(group)
        if not self.schedule.end(number, has_signal=counts):
            self.replaced[number] = (group.rewards if self.work.rates_row(group) else (), group.success_rate)
            self.work.failures.replace(number, len(group.endings()))
            self._leave_out([number], "asked again")
            self._forget([number])
        self._admit()
        self._look()

    def _look(self) -> None:
        """End the stream where the batch is there. ContractError where none can come: no run may wait for that."""
        self.work.request_next(self._groups[number] for number in self.schedule.running)
        if self.schedule.can_take():
            self._wake_up.set()
            if self._background is None:
                self.work.requests.end()
        elif self.schedule.is_stuck:
            raise ContractError(
                f"no group runs, and {self.schedule.num_complete} complete ones make no batch; this is a defect of rlcore"
            )

    def _take(self) -> list[GroupT]:
        self.work.failures.check()
        return [self._groups[number] for number in self.schedule.take()]

    def _forget_trained(self) -> None:
        replaced = self.schedule.refilled
        trained = set(self.schedule.training)
        closed = self.schedule.train()
        self._leave_out([number for number in closed if number not in trained], "dropped")
        self._forget(closed)
        self.work.failures.forget(self.work.group_size, [*closed, *replaced])
        self.replaced = {number: found for number, found in self.replaced.items() if number not in replaced}
        self.work.plans.keep([*self._groups, self.schedule.next_number])

    def _leave_out(self, numbers: Iterable[int], outcome: Outcome) -> None:
        """Note groups that no step trains on, before they are forgotten."""
        for group in (self._groups[number] for number in numbers):
            self.left_out.append(LeftOut(outcome=outcome, row=self.work.row_number(group), endings=group.endings()))

    def _forget(self, numbers: Collection[int]) -> None:
        self.work.forget([self._groups.pop(number) for number in numbers])

    def _restart(self) -> None:
        for number in list(self.schedule.running):
            if self.work.restart(self._groups[number], is_at_work=self._loop.is_at_work):
                self.schedule.restart(number)
