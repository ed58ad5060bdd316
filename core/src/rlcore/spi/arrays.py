"""Names for the array types of the interface, and the checks that all records share.

Shape suffixes used throughout: T tokens of a packed batch, N sequences, P prompts, S samples.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rlcore.spi.errors import ContractError, NonFiniteError

if TYPE_CHECKING:
    import pyarrow as pa

Int32Array: TypeAlias = NDArray[np.int32]
Int64Array: TypeAlias = NDArray[np.int64]
UInt8Array: TypeAlias = NDArray[np.uint8]
Int16Array: TypeAlias = NDArray[np.int16]
Float32Array: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]
AnyArray: TypeAlias = NDArray[Any]
_Array = TypeVar("_Array", bound=AnyArray)


def read_only(array: _Array) -> _Array:
    """A view that nobody can write to."""
    view = array.view()
    view.flags.writeable = False
    return view


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


def check_range(name: str, values: AnyArray, *, lower: float = -math.inf, upper: float = math.inf) -> None:
    """Finite, and within the bounds. Two reductions, which carry a NaN along."""
    if not len(values):
        return
    low, high = values.min(), values.max()
    if not (math.isfinite(low) and math.isfinite(high)):
        worst = int(np.argmin(np.isfinite(values)))
        raise NonFiniteError(f"{name}: found {values[worst]} at token {worst}; expected finite numbers")
    if low < lower or high > upper:
        worst = int(values.argmin() if low < lower else values.argmax())
        bound = f"at least {lower}" if low < lower else f"at most {upper}"
        raise ContractError(f"{name}: found {values[worst]} at token {worst}; expected {bound}")


def offsets_of(lengths: Sequence[int] | Int64Array) -> Int64Array:
    """int64 [N+1]: where rows of these lengths begin and end, one after another."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def gather_ragged(offsets: Int64Array, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the places of the elements of ragged rows `indices` [M], one row after another: positions [T'] and offsets
    [M+1]."""
    lengths = np.diff(offsets)[indices]
    gathered = offsets_of(lengths)
    return np.arange(gathered[-1], dtype=np.int64) + np.repeat(offsets[:-1][indices] - gathered[:-1], lengths), gathered


def take_rows(column: AnyArray, offsets: Int64Array, indices: Int64Array) -> AnyArray:
    """Ragged rows `indices` [M] of a column [T, ...], one after another: `column[gather_ragged(offsets, indices)[0]]`, but
    copied row by row, without the time and memory for an index to every element."""
    return _elements(_rows(column, offsets).take(indices), column)


def put_rows(parts: Sequence[AnyArray], offsets: Int64Array, indices: Int64Array) -> AnyArray:
    """The inverse of `take_rows`: a column [T] of which the ragged rows `indices` [M] lie one after another in `parts`; what is
    in none of these rows is 0. Of a row that is there twice, the last one counts."""
    num_rows, lengths = len(offsets) - 1, np.diff(offsets)
    absent = np.ones(num_rows, np.bool_)
    absent[indices] = False
    order = np.concatenate([indices, np.flatnonzero(absent)])
    positions = np.empty(num_rows, np.int64)
    positions[order] = np.arange(len(order))
    values = np.concatenate([*parts, np.zeros(lengths[absent].sum(), parts[0].dtype)])
    return take_rows(values, offsets_of(lengths[order]), positions)


def _rows(column: AnyArray, offsets: Int64Array) -> "pa.LargeBinaryArray":
    """Ragged rows as byte strings; a view."""
    import pyarrow as pa  # here, since it takes longer to import than all of the interface

    column = np.ascontiguousarray(column)
    bounds = pa.py_buffer(np.ascontiguousarray(offsets) * (column.itemsize * math.prod(column.shape[1:])))
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, [None, bounds, pa.py_buffer(column)])


def _elements(rows: "pa.LargeBinaryArray", like: AnyArray) -> AnyArray:
    """Return the values of fresh rows, one after another, in the dtype of `like`; a view."""
    elements = rows.buffers()[2]
    shape = like.shape[1:]
    if elements is None or not elements.size:
        return np.empty((0, *shape), like.dtype)
    return np.frombuffer(elements, like.dtype).reshape(-1, *shape)
