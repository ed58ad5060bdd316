"""Serialize objects to bytes, and read them back without running code, unlike pickle.

The format: eight bytes with the length of the JSON that follows, the JSON, then the bytes of the arrays. The JSON lists each
object once, after the objects that it consists of.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import cached_property
from inspect import getattr_static
from math import prod
from typing import Any, TypeAlias
from uuid import UUID

import attrs
import numpy as np

from rlcore.spi import CheckpointError

_INLINE = (type(None), bool, int, float, str)
"""Types that JSON writes as they are."""
_SEQUENCES: Mapping[str, Callable[[list[Any]], Any]] = {one.__name__: one for one in (list, tuple, set, frozenset)}
_TEXTS: Mapping[str, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    "datetime": (datetime.isoformat, datetime.fromisoformat),
    "date": (date.isoformat, date.fromisoformat),
    "time": (time.isoformat, time.fromisoformat),
    "timedelta": (lambda one: f"{one.days} {one.seconds} {one.microseconds}", lambda text: timedelta(*map(int, text.split()))),
    "Decimal": (str, Decimal),
    "Fraction": (str, lambda text: Fraction(*map(int, text.split("/")))),  # Fraction("1e999999999") computes for hours
    "UUID": (str, UUID),
}
"""The function that writes, and the one that reads, the values of classes that are stored as text, by the class's name."""
_TEXT_CLASSES = (datetime, date, time, timedelta, Decimal, Fraction, UUID)
MAX_DEPTH = 1000
"""Most objects within each other: hashing deeper tuples overflows the stack of the process."""
MAX_HASHED = 10**8
"""Most objects that keys and members of sets consist of together: a tuple that holds another one twice hashes it twice."""
_NUMBERS = "biufcSUMm"
"""Kinds of numpy arrays that hold no objects."""
_Node: TypeAlias = list[Any]


class SerializationError(ValueError):
    """Error for bytes that `dumps` did not make, or that need classes which this process does not have."""


def dumps(value: object) -> bytes:
    """Return `value` as bytes.

    It may consist of numbers, texts, bytes, dates, lists, tuples, sets, dicts, arrays, members of enumerations, and instances
    of attrs classes or dataclasses. TypeError names any other class, ValueError an object that contains itself.
    """
    writer = _Writer()
    root = writer.reference(value)
    described = json.dumps([writer.nodes, root, writer.num_bytes], separators=(",", ":")).encode()
    return b"".join([len(described).to_bytes(8, "little"), described, *writer.parts])


def loads(data: bytes) -> Any:
    """Return the object that `dumps` wrote. SerializationError where the bytes are damaged, or a class is missing or has other
    fields.

    Only classes of modules that are loaded already are used. Of their functions, only `__hash__` and `__eq__` are called, for
    members of sets and keys of dicts.
    """
    try:
        size = 8 + int.from_bytes(data[:8], "little")
        nodes, root, num_bytes = json.loads(data[8:size])
        if len(data) != size + num_bytes:
            raise SerializationError(f"found {len(data)} bytes; expected {size + num_bytes}")
        reader = _Reader(memoryview(data)[size:])
        for kind, *rest in nodes:
            reader.add(kind, rest)
        return reader.value(root)
    except SerializationError:
        raise
    except Exception as error:  # whatever damaged bytes lead to
        raise SerializationError(f"{type(error).__name__}: {error}") from error


def load_saved(data: bytes) -> Any:
    """Read bytes of a checkpoint as `loads` does. CheckpointError where it cannot be read."""
    try:
        return loads(data)
    except SerializationError as error:
        raise CheckpointError(
            f"the checkpoint's rollouts cannot be read: {error}. They are of the environment and the version of rlcore that "
            "wrote them"
        ) from error


class _Writer:
    def __init__(self) -> None:
        self.nodes: list[_Node] = []
        self.parts: list[bytes | memoryview] = []
        self.num_bytes = 0
        self._places: dict[int, int | None] = {}
        """The place of each object among the nodes, by identity; None while it is being written."""
        self._alive: list[object] = []
        """The objects written so far, kept alive so that no two have the same id."""

    def reference(self, value: Any) -> Any:
        if type(value) in _INLINE:
            return value
        if id(value) not in self._places:
            self._places[id(value)] = None
            self._alive.append(value)
            node = self._node(value)
            self._places[id(value)] = len(self.nodes)
            self.nodes.append(node)
        place = self._places[id(value)]
        if place is None:
            raise ValueError(f"a {type(value).__name__} contains itself")
        return [place]

    def _node(self, value: Any) -> _Node:
        cls = type(value)
        if cls in _SEQUENCES.values():
            return [cls.__name__, *map(self.reference, value)]
        if cls is dict:
            return ["dict", *map(self.reference, value), *map(self.reference, value.values())]
        if cls is bytes:
            return ["bytes", self._append(value), len(value)]
        if (cls is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in _NUMBERS:
            kind, array = "array" if cls is np.ndarray else "number", np.ascontiguousarray(value)
            return [kind, array.dtype.str, list(np.shape(value)), self._append(array.tobytes())]
        if cls in _TEXT_CLASSES and isinstance(getattr(value, "tzinfo", None), timezone | None):
            return [cls.__name__, _TEXTS[cls.__name__][0](value)]
        name = _name_of(cls)
        if isinstance(value, Enum):
            return ["enum", name, value.name]
        names = _fields_of(cls)
        more = [one for one in getattr(value, "__dict__", ()) if one not in names and not _is_cached(cls, one)]
        if more:
            raise TypeError(f"found a {name} with {', '.join(more)} beside its fields; expected {_EXPECTED}")
        return ["object", name, {field: self.reference(getattr(value, field)) for field in names}]

    def _append(self, data: bytes) -> int:
        self.parts.append(data)
        self.num_bytes += len(data)
        return self.num_bytes - len(data)


class _Reader:
    def __init__(self, data: memoryview) -> None:
        self._made: list[Any] = []
        self._depths: list[int] = []
        self._depth = 0
        """Depth of the objects within the one that is being made."""
        self._sizes: list[int] = []
        self._size = 0
        """Number of objects within that one, each counted as often as it occurs."""
        self._num_hashed = 0
        self._data = data
        self._num_read = 0

    def value(self, reference: Any) -> Any:
        if not isinstance(reference, list):
            return reference
        self._depth = max(self._depth, 1 + self._depths[reference[0]])
        self._size += self._sizes[reference[0]]
        return self._made[reference[0]]

    def add(self, kind: str, rest: list[Any]) -> None:
        """Make the next object."""
        self._depth, self._size = 0, 1
        made = self._made_of(kind, rest)
        if self._depth > MAX_DEPTH:
            raise SerializationError(f"found more than {MAX_DEPTH} objects within each other")
        self._made.append(made)
        self._depths.append(self._depth)
        self._sizes.append(self._size)

    def _made_of(self, kind: str, rest: list[Any]) -> Any:
        if kind in _SEQUENCES:
            members = [self.value(one) for one in rest]
            if kind.endswith("set"):
                self._will_hash()
            return _SEQUENCES[kind](members)
        if kind == "dict":
            keys = [self.value(one) for one in rest[: len(rest) // 2]]
            self._will_hash()
            return dict(zip(keys, [self.value(one) for one in rest[len(keys) :]], strict=True))
        if kind == "bytes":
            start, length = rest
            return bytes(self._next(start, length))
        if kind in ("array", "number"):
            dtype, shape, start = rest
            data = self._next(start, prod(shape) * np.dtype(dtype).itemsize)
            found = np.frombuffer(data, np.dtype(dtype)).reshape(shape).copy()
            return found if kind == "array" else found[()]
        if kind in _TEXTS:
            return _TEXTS[kind][1](rest[0])
        cls = _class_named(rest[0])
        if kind == "enum":
            return cls.__members__[rest[1]]
        return self._instance(cls, rest[0], rest[1])

    def _will_hash(self) -> None:
        """Count the objects that the values so far consist of, each of which is hashed. SerializationError where that would
        take long."""
        self._num_hashed += self._size
        if self._num_hashed > MAX_HASHED:
            raise SerializationError(f"found keys and members of sets that consist of more than {MAX_HASHED:,} objects")

    def _next(self, start: int, length: int) -> memoryview:
        """The bytes behind those that were read before: none are read twice, which would take more memory than there are."""
        end = self._num_read + length
        if start != self._num_read or not start <= end <= len(self._data):
            raise SerializationError(f"found bytes {start} to {start + length}; expected those from {self._num_read} on")
        self._num_read = end
        return self._data[start:end]

    def _instance(self, cls: Any, name: str, values: Mapping[str, Any]) -> Any:
        expected = set(_fields_of(cls))
        for differing, what in ((expected - values.keys(), "no"), (values.keys() - expected, "an unknown")):
            if differing:
                other = ", ".join(sorted(differing))
                raise SerializationError(f"{name} has {what} {other}: it is of another version of its package. Use that one")
        made = object.__new__(cls)  # not cls(...), which runs code of the class
        for field, reference in values.items():
            object.__setattr__(made, field, self.value(reference))
        return made


def _fields_of(cls: type) -> list[str]:
    if attrs.has(cls):
        return [field.name for field in attrs.fields(cls)]
    return [field.name for field in dataclass_fields(cls)]


def _is_cached(cls: type, name: str) -> bool:
    return isinstance(getattr_static(cls, name, None), cached_property)


def _name_of(cls: type) -> str:
    """Return the name by which `_class_named` finds a class. TypeError where it does not find this class."""
    name = f"{cls.__module__}:{cls.__qualname__}"
    try:
        found = _class_named(name)
    except SerializationError as error:
        raise TypeError(f"{error}; expected {_EXPECTED}") from None
    if found is not cls:
        raise TypeError(f"found a {name} that is not the module's own; expected {_EXPECTED}")
    return name


_EXPECTED = (
    "None, numbers, texts, bytes, dates, lists, tuples, sets, dicts, arrays of numbers, members of enumerations, or instances "
    "of a module's classes of attrs or dataclasses"
)


def _class_named(name: str) -> Any:
    """Return the class "module:qualified name" of a loaded module. No module is imported, since that runs its code."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if found is not None else None
    is_plain = isinstance(found, type) and (issubclass(found, Enum) or attrs.has(found) or is_dataclass(found))
    if not is_plain or hasattr(found, "__del__"):
        raise SerializationError(f"found {name}, which is no class of attrs, dataclasses or enumerations of a loaded module")
    return found
