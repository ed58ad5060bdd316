"""Collectors in processes of their own, as the schedule in the driver sees them."""

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

from attrs import define, field, frozen

from rlcore.run.protocols import CollectedRollouts
from rlcore.run.train_step.scorers import OnTokens
from rlcore.spi import Row, WorkerError
from rlcore.spi.execution import GeneratorGroup
from rlcore_rollout.collector_messages import CollectorHost, Command, CommandName, Event, GroupStart, Message, Reply, RunOptions
from rlcore_rollout.collectors import Collectors, GroupEvents, MayGoOn
from rlcore_rollout.environment_calls import POLL_S
from rlcore_rollout.environment_results import MaskedFailures
from rlcore_rollout.failures import Outcome
from rlcore_rollout.group_work import GroupResult
from rlcore_rollout.packed_groups import joined
from rlcore_rollout.slowest_calls import SlowestCalls
from rlcore_rollout.step_plans import StepPlans
from rlcore_rollout.trace_records import GroupRecord

T = TypeVar("T")
_Item: TypeAlias = tuple[int, Sequence[Message]] | Callable[[], None]
"""Messages of a collector, or a function to run."""


class CollectorProcesses:
    """The collectors of a run's engines. One thread handles all that they send, and runs functions between two events."""

    def __init__(self, hosts: Sequence[CollectorHost]) -> None:
        self._hosts = hosts
        self._runs: dict[int, RemoteCollectors] = {}
        self._num_runs = 0
        self._num_replies = 0
        self._outboxes: list[list[Command]] = [[] for _ in hosts]
        self._items: SimpleQueue[_Item | None] = SimpleQueue()
        self._deferred: deque[_Item | None] = deque()
        """Items that came while replies were waited for."""
        self._lost: WorkerError | None = None
        """The death of a collector, with which all are over."""
        self._is_closing = False
        self._thread = threading.Thread(target=self._work, name="collectors", daemon=True)
        self._receivers = [
            threading.Thread(target=self._receive, args=(index, host), name=f"collector-{index}", daemon=True)
            for index, host in enumerate(hosts)
        ]
        for thread in (self._thread, *self._receivers):
            thread.start()

    @property
    def num_collectors(self) -> int:
        """Return the number of collectors."""
        return len(self._hosts)

    def open(self, options: RunOptions, parts: "RemoteParts", *, overlaps: bool) -> "RemoteCollectors":
        """Open a run on all collectors. With `overlaps` they generate until they are paused."""

        def begin() -> RemoteCollectors:
            self._num_runs += 1
            self._runs = {number: run for number, run in self._runs.items() if not run.is_closed}
            run = RemoteCollectors(self, self._num_runs, parts, options.policy.groups_per_step, overlaps)
            self._runs[self._num_runs] = run
            for index in range(self.num_collectors):
                self.send(index, Command(run=self._num_runs, name="open", arguments=(options,)))
            return run

        return self.between(begin)

    def between(self, function: Callable[[], T]) -> T:
        """Return the result of a function that runs between two events."""
        if threading.current_thread() is self._thread:
            return function()
        if not self._thread.is_alive():
            raise self._lost or WorkerError("the collectors were ended")
        future = Future[T]()
        self._items.put(partial(_run_into, future, function))
        return future.result()

    def send(self, index: int, command: Command) -> None:
        """Send a collector a command once the present item is handled. In `between`."""
        self._outboxes[index].append(command)

    def ask(self, run: int, name: CommandName, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Send some collectors a command, and return their replies. In `between`. Events that a collector sent before its reply
        are handled first, others behind the present item. Raises the first error of a reply."""
        waited: dict[int, int] = {}
        for index, given in arguments.items():
            self._num_replies += 1
            waited[self._num_replies] = index
            self.send(index, Command(run=run, name=name, arguments=given, reply=self._num_replies))
        self._flush()
        replies = self._awaited(waited)
        for _, reply in sorted(replies.items()):
            if reply.error is not None:
                raise reply.error
        return {index: replies[index].value for index in arguments}

    def _awaited(self, waited: dict[int, int]) -> dict[int, Reply]:
        """Return the replies of these numbers by their collectors, and empty `waited`."""
        replies: dict[int, Reply] = {}
        deferred: list[_Item | None] = []
        try:
            while waited:
                if self._lost is not None:
                    raise self._lost
                item = self._deferred.popleft() if self._deferred else self._items.get()
                if item is None or callable(item) or item[0] not in waited.values():
                    deferred.append(item)
                    continue
                index, messages = item
                for place, message in enumerate(messages):
                    if isinstance(message, Reply) and message.number in waited:
                        replies[waited.pop(message.number)] = message
                        deferred += [(index, messages[place + 1 :])] if messages[place + 1 :] else []
                        break
                    self._handle(index, [message])
        finally:
            self._deferred.extendleft(reversed(deferred))  # also behind an error: other threads wait for their functions
        return replies

    def close(self) -> None:
        """End all collectors."""
        self._is_closing = True
        self._lost = self._lost or WorkerError("the collectors were ended")  # for what waits for a reply
        self._items.put(None)
        for host in self._hosts:
            with suppress(Exception):
                host.close()
        for thread in (self._thread, *self._receivers):
            thread.join()

    def _receive(self, index: int, host: CollectorHost) -> None:
        while not self._is_closing:
            try:
                messages = host.receive()
            except BaseException as error:  # nobody sees what a thread raises
                if not self._is_closing:
                    lost = error if isinstance(error, WorkerError) else WorkerError(f"collector {index}: {error}")
                    self._lost = self._lost or lost  # others may end with the first
                    self._items.put(self._fail_all)
                return
            if messages:
                self._items.put((index, messages))

    def _fail_all(self) -> None:
        for run in self._runs.values():
            run.fail(self._lost or WorkerError("a collector has died"))

    def _work(self) -> None:
        while True:
            item = self._deferred.popleft() if self._deferred else self._items.get()
            if item is None:
                return
            if callable(item):
                item()
            else:
                self._handle(*item)
            self._flush()

    def _handle(self, index: int, messages: Sequence[Message]) -> None:
        for message in messages:
            run = self._runs.get(message.run)
            if run is not None and isinstance(message, Event):
                run.handle(index, message)
        for run in list(self._runs.values()):
            run.look()

    def _flush(self) -> None:
        for index, (host, commands) in enumerate(zip(self._hosts, self._outboxes, strict=True)):
            if commands and self._lost is None:
                self._outboxes[index] = []
                try:
                    host.send(commands)
                except Exception as error:  # a row that does not pickle, too
                    self._lost = error if isinstance(error, WorkerError) else WorkerError(f"collector {index}: {error}")
                    self._fail_all()


def _run_into(future: "Future[T]", function: Callable[[], T]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


@frozen(kw_only=True, eq=False)
class RemoteParts:
    """The parts of a run that stay in the driver."""

    plans: StepPlans
    failures: MaskedFailures
    on_sampled: Callable[[int, int], None]
    """Gets the numbers of samples that ended, and that were asked for, of all collectors."""
    on_tokens: OnTokens | None
    slowest: SlowestCalls
    """Keeps the slowest calls of all collectors."""


@define(eq=False)
class RemoteCollectors(Collectors):
    """The groups of one run, each in the collector of its place in its step."""

    _processes: CollectorProcesses
    _run: int
    _parts: RemoteParts
    _groups_per_step: int
    _overlaps: bool
    is_closed: bool = field(default=False, init=False)
    """True where no event comes any more: groups can be saved until another run opens."""
    _events: GroupEvents = field(init=False)
    _failure: BaseException | None = field(default=None, init=False)
    _streaming: set[int] = field(factory=set, init=False)
    """Collectors whose stream has begun."""
    _sample_failed: bool = field(default=False, init=False)
    """True where samples failed after the last look."""
    _group_ended: bool = field(default=False, init=False)
    """True where groups ended after the last look."""
    _wake_up: threading.Event = field(factory=threading.Event, init=False)
    _counts: dict[int, tuple[int, int]] = field(factory=dict, init=False)
    _unknown: set[int] = field(factory=set, init=False)
    """Groups that were resumed before their prompts were known."""

    # Events.

    def listen(self, events: GroupEvents) -> None:
        """See Collectors."""
        self._events = events

    def handle(self, index: int, event: Event) -> None:
        """Handle an event of a collector."""
        try:
            self._handle(index, event.name, event.arguments)
        except BaseException as error:
            self.fail(error)

    def look(self) -> None:
        """Check failures and batches once all events that came together are handled."""
        has_failed, self._sample_failed = self._sample_failed, False
        has_ended, self._group_ended = self._group_ended, False
        try:
            if has_failed:
                self._parts.failures.check()
            if has_ended:
                self._events.look()
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Keep an error to be raised; first of all one that ends the run."""
        if self._failure is None or (isinstance(self._failure, WorkerError) and not isinstance(error, WorkerError)):
            self._failure = error
        self._wake_up.set()

    def _handle(self, index: int, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "sampled":
            self._counts[index] = arguments
            self._parts.on_sampled(*map(sum, zip(*self._counts.values(), strict=True)))
        elif name == "tokens":
            assert self._parts.on_tokens is not None, "it was asked for"
            self._parts.on_tokens(*arguments)
        elif name == "error":
            self._streaming.discard(index)
            self.fail(*arguments)
        elif name == "failed":
            self._parts.failures.add(*arguments)
            self._sample_failed = True
        else:
            getattr(self._events, name)(*arguments)
            self._group_ended |= name == "ended"

    # In the thread that trains.

    def begin_step(self) -> None:
        """See Collectors."""
        self.between(self._begin_step)

    def _begin_step(self) -> None:
        self._counts.clear()
        self._send_all("begin_step")

    def generate(
        self,
        generator: GeneratorGroup,  # noqa: ARG002 - each collector has engines of its own
        weight_version: int,
        is_complete: Callable[[], bool],
        may_go_on: MayGoOn,
    ) -> None:
        """See Collectors."""
        try:
            if self._overlaps or not self.call(is_complete):
                self.between(lambda: self._begin_streams(weight_version))
            while may_go_on() and not self.call(is_complete):
                self._wake_up.wait(POLL_S)
                self._wake_up.clear()
            if not self._overlaps:
                self.pause()
                self.raise_failure()
        except WorkerError:
            with suppress(WorkerError):  # the weights that come next are not to reach samples in flight
                self.pause()
            raise

    def _begin_streams(self, weight_version: int) -> None:
        new = set(range(self._processes.num_collectors)) - self._streaming
        self._streaming |= new
        self._ask("begin_stream", dict.fromkeys(sorted(new), (weight_version,)))

    @property
    def is_generating(self) -> bool:
        """See Collectors."""
        return self._overlaps and bool(self._streaming)

    def pause(self) -> None:
        """See Collectors."""
        self.between(self._pause)

    def _pause(self) -> None:
        streaming, self._streaming = sorted(self._streaming), set()
        self._ask("pause", dict.fromkeys(streaming, ()))

    def idle_s(self) -> float:
        """See Collectors: in which no collector asked for a sample."""
        return min(idle_s for idle_s, _ in self._figures())

    def busy_s(self) -> float:
        """See Collectors: of the collector with the most."""
        return max(busy_s for _, busy_s in self._figures())

    def _figures(self) -> list[tuple[float, float]]:
        found = self.between(lambda: self._ask_all("figures")).values()
        for _, _, slowest in found:
            self._parts.slowest.merge(slowest)
        return [(idle_s, busy_s) for idle_s, busy_s, _ in found]

    @property
    def has_failed(self) -> bool:
        """See Collectors."""
        return self._failure is not None

    def raise_failure(self) -> None:
        """See Collectors."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def between(self, function: Callable[[], T]) -> T:
        """See Collectors."""
        return self._processes.between(function)

    def call(self, function: Callable[[], T]) -> T:
        """See Collectors."""
        result = self.between(function)
        self.raise_failure()
        return result

    def packed(self, numbers: Sequence[int]) -> CollectedRollouts:
        """See Collectors."""
        of_each = self._of_each(numbers)
        found = self.between(lambda: self._ask("part", {index: (own,) for index, own in of_each.items()}))
        return joined(list(found.values()), list(of_each.values()))

    @contextmanager
    def still(self) -> Iterator[None]:
        """See Collectors."""
        self.between(lambda: self._ask_all("hold"))
        try:
            yield
        finally:
            self.between(lambda: self._send_all("release"))

    def close(self) -> None:
        """See Collectors."""
        with suppress(WorkerError):
            self.between(self._close)

    def _close(self) -> None:
        self._streaming.clear()
        self.is_closed = True
        self._ask_all("close")

    # Where `between` runs.

    def begin(self, numbers: Sequence[int]) -> Sequence[int]:
        """See Collectors."""
        for index, own in self._of_each(numbers).items():
            self._send(index, "begin", [self._start_of(number) for number in own])
        self._unknown.update(numbers)
        return numbers

    def replace(self, number: int, row: Row | None, spare: int) -> None:
        """See Collectors."""
        self._send(self._index_of(number), "replace", number, row, spare)

    def go_on(self, numbers: Collection[int]) -> None:
        """See Collectors."""
        for index, own in self._of_each(numbers).items():
            self._send(index, "go_on", own)

    def forget(self, numbers: Collection[int], outcome: Outcome | None) -> None:
        """See Collectors."""
        self._unknown.difference_update(numbers)
        for index, own in self._of_each(numbers).items():
            self._send(index, "forget", own, outcome)

    def restart(self, numbers: Collection[int]) -> list[int]:
        """See Collectors."""
        found = self._ask("restart", {index: (own,) for index, own in self._of_each(numbers).items()})
        return [number for own in found.values() for number in own]

    def request_complete(self) -> None:
        """See Collectors."""
        self._wake_up.set()

    def records(self, numbers: Sequence[int]) -> list[GroupRecord]:
        """See Collectors."""
        found = self._ask("records", {index: (own,) for index, own in self._of_each(numbers).items()})
        return sorted((one for own in found.values() for one in own), key=lambda one: one.number)

    def saved(self, numbers: Sequence[int]) -> tuple[dict[int, bytes], list[str]]:
        """See Collectors."""
        found = self._ask("saved", {index: (own,) for index, own in self._of_each(numbers).items()})
        kept = {number: state for own, _ in found.values() for number, state in own.items()}
        return dict(sorted(kept.items())), [error for _, errors in found.values() for error in errors]

    def resume(self, saved: Mapping[int, bytes], running: Collection[int]) -> dict[int, GroupResult | None]:
        """See Collectors."""
        given = {}
        for index, own in self._of_each(list(saved)).items():
            starts = [self._start_of(number) for number in own]
            given[index] = (starts, {number: saved[number] for number in own}, [one for one in own if one in running])
        results: dict[int, GroupResult | None] = {}
        for found, unknown in self._ask("resume", given).values():
            results |= found
            self._unknown.update(unknown)
        return results

    def begins(self, number: int) -> bool:
        """See Collectors."""
        return number in self._unknown

    def _index_of(self, number: int) -> int:
        """The collector of a group: those of a step are divided in order, so that their columns follow each other."""
        return number % self._groups_per_step * self._processes.num_collectors // self._groups_per_step

    def _of_each(self, numbers: Collection[int]) -> dict[int, list[int]]:
        """Return the groups of each collector that has some, both ascending."""
        found: dict[int, list[int]] = {}
        for number in sorted(numbers):
            found.setdefault(self._index_of(number), []).append(number)
        return dict(sorted(found.items()))

    def _start_of(self, number: int) -> GroupStart:
        plans = self._parts.plans
        key = plans.of_step(plans.step_of(number)).draws.key
        return GroupStart(number=number, row=plans.row(number), row_number=plans.row_number(number), key=key)

    def _send(self, index: int, name: CommandName, *arguments: Any) -> None:
        self._processes.send(index, Command(run=self._run, name=name, arguments=arguments))

    def _send_all(self, name: CommandName) -> None:
        for index in range(self._processes.num_collectors):
            self._send(index, name)

    def _ask(self, name: CommandName, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        return self._processes.ask(self._run, name, arguments)

    def _ask_all(self, name: CommandName) -> dict[int, Any]:
        return self._ask(name, dict.fromkeys(range(self._processes.num_collectors), ()))
