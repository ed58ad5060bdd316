"""Weights on their way from trainer to generator: named tensors in Hugging Face naming, in buckets, each with a digest."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from attrs import frozen

from rlcore.spi.shards import ShardExport

if TYPE_CHECKING:
    from rlcore.spi.arrays import AnyArray

DtypeName: TypeAlias = Literal["float32", "bfloat16", "float16"]
Head: TypeAlias = Literal["tokens", "value"]
"""The output layer of a model: the vocabulary's head, or one linear output a token."""
VALUE_HEAD_WEIGHT = "score.weight"
"""The name of that output's weight, [1, hidden], in transformers' *ForSequenceClassification."""

ITEM_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
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
