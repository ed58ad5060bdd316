"""A refit channel: one way for weights to travel from trainer to generator, described so that the driver imports no torch.

In `pyproject.toml`::

    [project.entry-points."rlcore.channels"]
    pipe = "my_package.provider:PIPE"

In `my_package/provider.py`, which imports nothing heavy::

    PIPE = ChannelProvider(
        name="pipe",
        spi=(2, 0),
        cost=45,
        reach="shared",
        devices={"cpu"},
        sender="my_package.pipe:Sender",
        receiver="my_package.pipe:Receiver",
    )

A refit calls, where the trainer's tensors are: `connect` once, then for each refit `begin`, for each bucket `put` and
`acknowledged`, and `end`. On the generator's side, in each rank that holds weights: `begin`, for each bucket `receive` and
`loaded`, and `end`. The generator's backend carries what `connect` and `put` return to the receivers.
"""

# ruff: noqa: B027

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

from attrs import field, frozen

from rlcore.schema.printable import plain_texts
from rlcore.spi.errors import PluginError
from rlcore.spi.provider import always_available, as_frozen, installed_in
from rlcore.spi.weights import Delta, TensorSpec

CHANNEL_GROUP = "rlcore.channels"
"""Entry-point group of channels, each a ChannelProvider under the channel's name."""
Reach: TypeAlias = Literal["process", "shared", "separate", "anywhere"]
"""The place in which a channel finds the generator: in the trainer's own process, on the trainer's devices in another process,
on devices of the generator's own, or anywhere."""


@frozen(kw_only=True, field_transformer=plain_texts)
class ChannelProvider:
    """The description of one channel."""

    name: str
    """The name in `refit.channel` and in requests; equal to the entry point's name."""
    spi: tuple[int, int]
    """The SPI version that the channel was written for: (major, minor)."""
    cost: int
    """`refit.channel = "auto"` takes the channel of the lowest cost that trainer and generator both have. rlcore's own have
    cuda_ipc 10, nccl 20, in_process 30, shared_memory 40, shards 50, directory 60."""
    devices: frozenset[str] = field(converter=as_frozen)
    """The devices ("cpu", "cuda") of trainers whose weights it can carry."""
    reach: Reach
    """The place in which it finds the generator."""
    sharded: bool = False
    """True where weights travel as the parts that the trainer's ranks hold (ExportWeightsRequest.sharded)."""
    delta: bool = False
    """True where it can carry changes alone (RefitRequest.delta, and ExportWeightsRequest.delta where it is `sharded`)."""
    sender: str | None = None
    """`package.module:Class`, a ChannelSender, imported where the trainer's tensors are. None where trainer and generator that
    declare `refit.NAME` have both ends themselves."""
    receiver: str | None = None
    """`package.module:Class`, a ChannelReceiver, imported where the generator's weights are; None where `sender` is."""
    unavailable: Callable[[], str | None] = always_available
    """A reason why it cannot be used here, with its remedy, or None. Must be quick and import nothing heavy."""

    @property
    def capability(self) -> str:
        """The capability of trainers and generators that know this channel."""
        return f"refit.{self.name}"

    def fits(self, declared: frozenset[str], *, separate: bool = False) -> bool:
        """Return whether a trainer or generator with these capabilities can use it: it knows the channel, or any channel of its
        reach. `separate` says that the generator has devices of its own, where one in the trainer's process is none."""
        reaches = {self.reach} if separate or self.reach != "anywhere" else {"anywhere", "process"}
        is_any = self.sender is not None and not declared.isdisjoint(f"{reach}_channels" for reach in reaches)
        return self.capability in declared or is_any

    def make_sender(self, options: "ChannelOptions", device: Any) -> "ChannelSender":
        """Import the sender and build it; `device` is the torch.device that holds the tensors that will be sent."""
        return _load(self, self.sender)(options, device)  # type: ignore[no-any-return]

    def make_receiver(self, device: Any, rank: int, options: dict[str, Any]) -> "ChannelReceiver":
        """Import the receiver and build it, in a rank that holds weights on the torch.device `device`. `options` are those that
        the sender's `connect` returned for the rank's replica."""
        return _load(self, self.receiver)(device, rank, options)  # type: ignore[no-any-return]


@frozen(kw_only=True)
class ChannelOptions:
    """The options of the channel in a generator's section."""

    directory: str | None = None
    """Its option `refit_directory`: a folder that sender and receivers both see; None for one of the sender's choice."""
    timeout_s: float = 600.0
    """How long one side waits for the other."""


@frozen(kw_only=True)
class ReceiverRank:
    """One rank of one replica of a generator, as its process describes itself."""

    replica: int
    rank: int
    pid: int
    host: str
    device: str
    """"cpu" or "cuda"."""
    uuid: str | None = None
    """The UUID of the CUDA device."""


@frozen(kw_only=True, eq=False)
class ReceivedBucket:
    """The tensors of a bucket on the receiver's side."""

    tensors: list[Any]
    """Torch tensors in the order of their specs, each of its spec's shape and dtype."""
    stable: bool
    """True where they keep their values until the refit ends, and not just until `loaded`."""


class ChannelSender(ABC):
    """Puts buckets where the receivers find them. A method with nothing but a docstring may be left as it is.

    It needs the tensors and a way to hand plain containers to every receiver, and nothing else of the process it is in.
    """

    num_slots: ClassVar[int] = 1
    """2 where a bucket may be put while the receivers still take the one before; 1 where the trainer must not even make it."""

    def __init__(self, options: ChannelOptions, device: Any) -> None:
        self.options = options
        self.device = device
        """The torch.device of the tensors."""
        self.sent_bytes: int | None = None
        """Bytes of this refit, where they are counted."""

    @abstractmethod
    def connect(self, ranks: Sequence[ReceiverRank]) -> list[dict[str, Any]]:
        """Return the options of each replica's receivers, in plain containers. RefitError where they cannot be reached this
        way.

        Receivers are made right afterwards; what has to wait for them is left to `join`.
        """

    def join(self) -> None:
        """Called while the receivers connect."""

    def begin(self, specs: tuple[TensorSpec, ...], *, persistent: bool, delta: Delta = "off") -> None:
        """Prepare for a refit that begins, of these tensors; `persistent` as in WeightExport, `delta` as in RefitRequest."""

    @abstractmethod
    def put(self, index: int, tensors: Sequence[Any]) -> dict[str, Any]:
        """Make bucket `index` of this refit reachable. Return, in plain containers, where it is.

        `tensors` are torch tensors of any shape and layout, which may change once the bucket is acknowledged."""

    def check(self) -> None:
        """Raise if what is on its way can no longer arrive."""

    def acknowledged(self, index: int) -> None:
        """Called once every receiver has taken bucket `index`."""

    def end(self) -> None:
        """The refit is over, well or badly: nothing of it is needed any more."""

    def close(self) -> None:
        """Free everything. It may be called again."""


class ChannelReceiver(ABC):
    """Takes buckets in one rank of a generator. A method with nothing but a docstring may be left as it is."""

    def __init__(self, device: Any, rank: int, options: dict[str, Any]) -> None:
        self.device = device
        self.rank = rank
        self.options = options
        self.persistent = False

    def begin(self, persistent: bool) -> None:
        """A refit begins; `persistent` as in WeightExport."""
        self.persistent = persistent

    @abstractmethod
    def receive(self, where: dict[str, Any], specs: Sequence[TensorSpec]) -> ReceivedBucket:
        """Return the bucket that `put` described, on this rank's device."""

    def loaded(self) -> None:
        """Note that the weights of the last `receive` have been loaded, on CUDA in the order of the current stream."""

    def end(self) -> None:
        """Release what the refit that has ended needed."""

    def close(self) -> None:
        """Free everything. It may be called again."""


def installed_channels() -> dict[str, ChannelProvider]:
    """Return the installed channels by name, for the processes that a chosen channel connects. One that cannot be imported is
    left out; the driver lists it with its error."""
    return installed_in(CHANNEL_GROUP, ChannelProvider)


def find_channel(name: str) -> ChannelProvider:
    """Return the installed channel of a name. PluginError where there is none."""
    if name not in installed_channels():
        there = ", ".join(sorted(installed_channels())) or "none"
        raise PluginError(f"refit.channel: {name!r} is not installed in this process; found {there}. Install the same packages")
    return installed_channels()[name]


def _load(channel: ChannelProvider, path: str | None) -> Any:
    if path is None:
        raise PluginError(f"refit channel {channel.name!r} has no ends of its own; expected a backend that has them")
    return pkgutil.resolve_name(path)
