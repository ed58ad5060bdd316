"""Weights that travel as the parts that a trainer's ranks hold, without being gathered: from rank to rank, by a plan."""

from typing import Literal, TypeAlias

from attrs import define, field, frozen

Delta: TypeAlias = Literal["off", "device", "host"]
"""The device on which both sides of a delta refit keep copies, so that only changes travel; "off" for refits of all weights."""


@frozen(order=True)
class ShardSlice:
    """A part of a tensor: in dimension d the indices from `start[d]` to before `stop[d]`."""

    name: str
    """The tensor's Hugging Face name."""
    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Elements; none where a dimension is empty or turned round."""
        size = 1
        for start, stop in zip(self.start, self.stop, strict=True):  # plans ask for millions of them
            size *= stop - start if stop > start else 0
        return size

    def common(self, other: "ShardSlice") -> "ShardSlice":
        """Return the intersection, which may be empty."""
        start = tuple(map(max, self.start, other.start))
        return ShardSlice(self.name, start, tuple(map(max, start, map(min, self.stop, other.stop))))

    def within(self, outer: "ShardSlice") -> tuple[slice, ...]:
        """Return its slices in a tensor that holds `outer`."""
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, outer.start, strict=True))


@frozen(kw_only=True)
class ShardRoute:
    """How a generator's ranks are reached. They form one group with the trainer's, which come first, and with the ranks of the
    other generators that the same refit reaches."""

    address: str
    """"host:port" of a store of torch.distributed in which the group meets."""
    name: str
    """Tells the group from others that meet in the store. One that was not used before makes a group anew."""
    wanted: tuple[tuple[ShardSlice, ...], ...]
    """The parts that each of the generator's ranks wants."""
    timeout_s: float
    """How long one rank waits for another."""


@define(kw_only=True, eq=False)
class ShardExport:
    """A trainer's weights as parts. `WeightExport.buckets` brings none then: read to its end on every rank, it sends them."""

    held: tuple[tuple[ShardSlice, ...], ...] = field(on_setattr=None)
    """The parts that each of the trainer's ranks holds; the same on every rank, and of replicas too."""
    max_bucket_bytes: int = field(on_setattr=None)
    """Tensors are sent in groups of at most so much, or one that is larger, in the order of WeightExport.specs."""
    delta: Delta = field(default="off", on_setattr=None)
    """Unless "off", each rank of the trainer and of the generator keeps what it has sent or taken. To ranks that share what
    they get, changes alone travel where all of them keep the sender's version; else whole parts."""
    route: ShardRoute | None = None
    """Set by a generator beside this rank, once its own ranks wait, before it reads the buckets. None elsewhere; with None on
    every rank nothing is sent."""
    digest: int | None = None
    """The digest of what this rank has sent: the sum mod 2^64 of its buckets' digests, one for each rank that takes a bucket,
    once the buckets are read. A bucket's is that of all parts in it, also where changes alone have travelled."""
    sent_bytes: int | None = None
    """Bytes that this rank has sent, once the buckets are read; None where it does not count them. What the generators' ranks
    pass on among themselves is not in it."""
