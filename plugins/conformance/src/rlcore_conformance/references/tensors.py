"""Weights as the kit sees them: read out of any array type, and packed into exports as a trainer would send them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlcore.spi import DtypeName, NamedTensor, TensorSpec, WeightBucket, WeightExport, tensor_digest

Values: TypeAlias = Mapping[str, NDArray[np.float32]]
"""Weights by Hugging Face name."""


def bytes_of(tensor: Any) -> NDArray[np.uint8]:
    """uint8 [bytes]: a copy of what a torch tensor, a numpy array or another one with `__dlpack__` holds."""
    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).copy()
    import torch

    raw: NDArray[np.uint8] = torch.as_tensor(tensor).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().copy()
    return raw


def values_of(tensor: Any) -> NDArray[np.float32]:
    """float32: a copy of the values."""
    if isinstance(tensor, np.ndarray):
        return tensor.astype(np.float32)
    import torch

    values: NDArray[np.float32] = torch.as_tensor(tensor).detach().float().cpu().numpy().copy()
    return values


def num_bytes(weights: Mapping[str, Any]) -> int:
    """Return the bytes of all tensors; of those that are equal, as a head is that is tied to the embedding, once."""
    return sum({content.tobytes(): len(content) for content in map(bytes_of, weights.values())}.values())


def dtype_of(tensor: Any) -> DtypeName:
    """The name of the dtype."""
    name: DtypeName = str(tensor.dtype).rpartition(".")[2]  # type: ignore[assignment]
    return name


def collect(export: WeightExport) -> dict[str, NDArray[np.float32]]:
    """Read an export to its end, each bucket before the next is taken."""
    return {named.name: values_of(named.tensor) for bucket in export.buckets for named in bucket.tensors}


def make_export(
    weights: Mapping[str, Any],
    weight_version: int,
    *,
    persistent: bool = False,
    max_bucket_bytes: int = 1 << 14,
    change: Callable[[list[WeightBucket]], list[WeightBucket]] | None = None,
) -> WeightExport:
    """An export of `weights`, torch tensors or numpy arrays.

    One that is not persistent sends copies and spoils each bucket when the next is taken, as a trainer that reuses its
    buffers would. `change` makes the stream differ from what `specs` and the digests promise.
    """
    specs = tuple(TensorSpec(name=name, shape=tuple(value.shape), dtype=dtype_of(value)) for name, value in weights.items())
    buckets = list(_cut(weights if persistent else copies(weights), max_bucket_bytes))
    stream = buckets if change is None else change(buckets)
    return WeightExport(
        weight_version=weight_version,
        specs=specs,
        buckets=iter(stream) if persistent else _spoiling(stream),
        persistent=persistent,
    )


def _cut(weights: Mapping[str, Any], max_bucket_bytes: int) -> Iterator[WeightBucket]:
    held: list[NamedTensor] = []
    num_bytes = 0
    for name, value in weights.items():
        if held and num_bytes + value.nbytes > max_bucket_bytes:
            yield WeightBucket(tensors=tuple(held))
            held, num_bytes = [], 0
        held.append(NamedTensor(name=name, tensor=value, digest=tensor_digest(bytes_of(value))))
        num_bytes += value.nbytes
    yield WeightBucket(tensors=tuple(held))


def _spoiling(buckets: Sequence[WeightBucket]) -> Iterator[WeightBucket]:
    for bucket in buckets:
        yield bucket
        for named in bucket.tensors:
            named.tensor[...] = float("nan")


def copies(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors of one's own with the same values."""
    return {name: _copied(value) for name, value in weights.items()}


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value.detach().clone()


def corrupt_value(buckets: list[WeightBucket]) -> list[WeightBucket]:
    """One number of the last tensor arrives changed."""
    last = buckets[-1].tensors[-1].tensor
    last.reshape(-1)[0] += 1.0
    return buckets


def drop_tensor(buckets: list[WeightBucket]) -> list[WeightBucket]:
    """The last tensor does not arrive."""
    kept = buckets[-1].tensors[:-1]
    return [*buckets[:-1], WeightBucket(tensors=kept)] if kept else buckets[:-1]


def repeat_tensor(buckets: list[WeightBucket]) -> list[WeightBucket]:
    """The first tensor arrives once more, with other values, in place of the last."""
    first = buckets[0].tensors[0]
    other = _copied(first.tensor)
    other[...] = 0.0
    again = NamedTensor(name=first.name, tensor=other, digest=tensor_digest(bytes_of(other)))
    return [*drop_tensor(buckets), WeightBucket(tensors=(again,))]
