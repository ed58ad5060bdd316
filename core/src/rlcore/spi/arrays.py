"""Names for the array types of the interface, and the one check that all records share.

Shape suffixes used throughout: T tokens of a packed batch, N sequences, P prompts, S samples.
"""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rlcore.spi.errors import ContractError

Int32Array: TypeAlias = NDArray[np.int32]
Int64Array: TypeAlias = NDArray[np.int64]
UInt8Array: TypeAlias = NDArray[np.uint8]
Float32Array: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]
AnyArray: TypeAlias = NDArray[Any]


def check_array(name: str, array: object, dtype: DTypeLike, length: int | None = None) -> None:
    """Raise ContractError unless `array` is one-dimensional, of exactly `dtype` and, where given, `length` long."""
    if not isinstance(array, np.ndarray):
        raise ContractError(f"{name}: found {type(array).__name__}; expected a numpy array of {np.dtype(dtype)}")
    if array.dtype != np.dtype(dtype) or array.ndim != 1 or (length is not None and len(array) != length):
        expected = f"[{'any' if length is None else length}] of {np.dtype(dtype)}"
        raise ContractError(f"{name}: found shape {list(array.shape)} of {array.dtype}; expected {expected}")


def check_offsets(name: str, offsets: Int64Array, num_items: int, *, allow_empty: bool) -> None:
    """Raise ContractError unless `offsets` int64 [N+1] rises from 0 to `num_items`; `allow_empty` admits length 0."""
    check_array(name, offsets, np.int64)
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != num_items:
        raise ContractError(f"{name}: found {offsets[:1]} … {offsets[-1:]}; expected to start at 0, end at {num_items}")
    lengths = np.diff(offsets)
    if len(lengths) and lengths.min() < (0 if allow_empty else 1):
        worst = int(lengths.argmin())
        least = "lengths of at least 0" if allow_empty else "lengths of at least 1"
        raise ContractError(f"{name}: sequence {worst} has length {lengths[worst]}; expected {least}")


def gather_ragged(offsets: Int64Array, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Where the elements of ragged rows `indices` [M] lie, one row after another: positions [T'] and offsets [M+1]."""
    lengths = np.diff(offsets)[indices]
    gathered = np.zeros(len(indices) + 1, np.int64)
    np.cumsum(lengths, out=gathered[1:])
    return np.arange(gathered[-1], dtype=np.int64) + np.repeat(offsets[:-1][indices] - gathered[:-1], lengths), gathered


def take_rows(column: AnyArray, offsets: Int64Array, indices: Int64Array) -> AnyArray:
    """Ragged rows `indices` [M] of a column [T], one after another: `column[gather_ragged(offsets, indices)[0]]`, but copied
    row by row, without the time and memory for an index to every element."""
    import pyarrow as pa  # here, since it takes longer to import than all of the interface

    column = np.ascontiguousarray(column)
    bounds = pa.py_buffer(np.ascontiguousarray(offsets) * column.itemsize)
    rows = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, [None, bounds, pa.py_buffer(column)])
    taken = rows.take(pa.array(indices)).buffers()[2]
    return np.frombuffer(taken, column.dtype) if taken is not None and taken.size else np.empty(0, column.dtype)
