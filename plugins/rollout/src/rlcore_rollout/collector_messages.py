"""Messages between the schedule of a run, in the driver, and collectors in other processes, and what carries them."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

from attrs import frozen

from rlcore.secrets import masked_traceback
from rlcore.spi import RewardError, RlcoreError, Row
from rlcore.spi.execution import GeneratorGroup
from rlcore_rollout.schedule import SchedulePolicy

CommandName: TypeAlias = Literal[
    "open",
    "begin_stream",
    "pause",
    "hold",
    "release",
    "figures",
    "begin_step",
    "close",
    "begin",
    "replace",
    "go_on",
    "forget",
    "restart",
    "part",
    "records",
    "saved",
    "resume",
]
EventName: TypeAlias = Literal["begun", "too_long", "ended", "left_out", "failed", "sampled", "tokens", "error"]


@frozen(kw_only=True, eq=False)
class Command:
    """A call of a collector."""

    run: int
    """The run that it is of: training, or one evaluation."""
    name: CommandName
    arguments: tuple[Any, ...] = ()
    reply: int | None = None
    """The number that the reply is to have; None where none is waited for."""


@frozen(kw_only=True, eq=False)
class Reply:
    """The result of a command."""

    run: int
    number: int
    value: Any = None
    error: BaseException | None = None


@frozen(kw_only=True, eq=False)
class Event:
    """An event of a collector's groups."""

    run: int
    name: EventName
    arguments: tuple[Any, ...]


@frozen(kw_only=True, eq=False)
class GroupStart:
    """The start of a group: its row and the key of its random choices."""

    number: int
    row: Row
    row_number: int | None
    key: tuple[int, ...]
    """The key of its step's random choices."""


@frozen(kw_only=True, eq=False)
class RunOptions:
    """The options of a run of collectors."""

    sampler: Mapping[str, Any]
    """Fields of EpisodeSampler but for the parts that each process has."""
    policy: SchedulePolicy
    sends_tokens: bool
    """True where the driver asks for the tokens of each sample as soon as they are there."""


Message: TypeAlias = Reply | Event


class Endpoint(Protocol):
    """A collector in its process."""

    def take(self, commands: Sequence[Command]) -> None:
        """Carry out commands, in order. Never raises."""

    def collect(self) -> list[Message]:
        """Return what came since the last time, once there is something or a second has passed. In a thread of its own."""

    def close(self) -> None:
        """End all work, and close the environment."""


MakeEndpoint: TypeAlias = Callable[[GeneratorGroup, int, int], Endpoint]
"""Builds the collector of a process for a generator, by its number and the number of all. It pickles."""


class CollectorHost(Protocol):
    """A process with a collector, beside some of a run's engines, as an execution has started it."""

    def send(self, commands: Sequence[Command]) -> None:
        """Hand commands to `Endpoint.take`, in order, without waiting."""

    def receive(self) -> Sequence[Message]:
        """Return what `Endpoint.collect` does. WorkerError where the process has died, or does not answer. In a thread of its
        own."""

    def close(self) -> None:
        """End the process."""


class HostsCollectors(Protocol):
    """A GeneratorGroup whose execution runs collectors beside its engines."""

    num_collectors: int
    """1 where the driver is to collect by itself."""

    def start_collectors(self, make: MakeEndpoint) -> Sequence[CollectorHost]:
        """Start a process with a collector for each part of the engines. Each stream of a collector is one of its engines."""


def portable(error: BaseException) -> BaseException:
    """Return an error that another process can read, with its traceback as a note."""
    try:
        restored: BaseException = pickle.loads(pickle.dumps(error))
        is_same = type(restored) is type(error) and str(restored) == str(error)
    except Exception:
        is_same = False
    found = error if is_same else RewardError(f"{type(error).__name__}: {error}")
    if not isinstance(error, RlcoreError | KeyboardInterrupt):  # whose message says everything
        found.add_note(f"raised in a collector:\n{masked_traceback(error)}")
    return found
