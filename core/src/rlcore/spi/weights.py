"""Weights on their way from trainer to generator: named tensors in Hugging Face naming, in buckets, each with a digest."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from attrs import frozen

if TYPE_CHECKING:
    from rlcore.spi.arrays import AnyArray
from attrs import define, field

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
    """The address of a generator's ranks. They form one group with the trainer's, which come first, and with the ranks of the
    other generators that the same refit reaches."""

    address: str
    """"host:port" of a store of torch.distributed in which the group meets."""
    name: str
    """Tells the group from others that meet in the store. Routes of one name reach the same ranks and share their group,
    whatever parts these want. A name that was not used before makes a group anew."""
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


DtypeName: TypeAlias = Literal["float64", "float32", "bfloat16", "float16"]
Head: TypeAlias = Literal["tokens", "value"]
"""The output layer of a model: the vocabulary's head, or one linear output a token."""
VALUE_HEAD_WEIGHT = "score.weight"
"""The name of that output's weight, [1, hidden], in transformers' *ForSequenceClassification."""

_OF_ADAPTERS = (".lora_A.weight", ".lora_B.weight")
"""Behind the names of layers, in those of their adapters' tensors."""
ITEM_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one number of each DtypeName."""
_CHUNK_BYTES = 2**22
"""A digest's words are widened so many bytes at a time, so that a large tensor's take no memory of its size."""


@frozen(kw_only=True)
class TensorSpec:
    """The description of a tensor, without its values."""

    name: str
    """Hugging Face name, as in a safetensors file of the model. A tied tensor is listed once, under its first name."""
    shape: tuple[int, ...]
    dtype: DtypeName
    keeps_dtype: bool = False
    """True where `dtype` is the model's own for this tensor, whatever the others are cast to: what does not train and has to be
    exact, such as the biases by which routers choose."""


@frozen(kw_only=True, eq=False)
class NamedTensor:
    """One full (unsharded) tensor."""

    name: str
    tensor: Any
    """A torch tensor, or an array of another library that `torch.as_tensor` reads, as it does what has `__dlpack__`; never
    written to by the receiver."""
    digest: int
    """The `tensor_digest` of the tensor's bytes."""


@frozen(kw_only=True, eq=False)
class WeightBucket:
    """Tensors that travel together. Valid until the next bucket is taken, unless WeightExport.persistent."""

    tensors: tuple[NamedTensor, ...]


@frozen(kw_only=True, eq=False)
class WeightExport:
    """A trainer's weights at one version."""

    weight_version: int
    specs: tuple[TensorSpec, ...]
    """Every tensor that the buckets will bring, in their order."""
    buckets: Iterator[WeightBucket]
    """Read once and to its end; each tensor of `specs` comes exactly once."""
    persistent: bool
    """True where the tensors are the trainer's own storage: they stay valid, and later train_steps change them in place."""
    shards: ShardExport | None = None
    """The parts that are sent in place of buckets, where the request is `sharded`."""

    @property
    def has_weights(self) -> bool:
        """Return whether it brings the model's own weights, and not A and B of adapters alone."""
        return not all(spec.name.endswith(_OF_ADAPTERS) for spec in self.specs)


def tensor_digest(array: "AnyArray") -> int:
    """Checksum of a tensor's bytes: Σ w_i · (2i + 1) mod 2⁶⁴ over its little-endian signed 32-bit words, zero-padded.

    One changed word always changes it, since 2i + 1 is odd; so do, but for rare collisions, moved and missing words.
    Computable on any device with integer arithmetic; `rlcore_torchkit` has the torch form. Not cryptographic.
    """
    import numpy as np  # here alone: providers, which `rlcore plugins` lists, need the names above

    raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    total = 0
    for start in range(0, len(raw), _CHUNK_BYTES):
        chunk = raw[start : start + _CHUNK_BYTES]
        words = np.pad(chunk, (0, -len(chunk) % 4)).view("<i4").astype(np.int64)
        factors = np.arange(start // 4, start // 4 + len(words), dtype=np.int64) * 2 + 1
        with np.errstate(over="ignore"):
            total += int((words * factors).sum(dtype=np.int64))
    return total % 2**64
