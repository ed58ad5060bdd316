"""Divides and joins slices of tensors, so that a part that several ranks want travels once. Imports no torch."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, product
from operator import lt

from rlcore.spi import ShardSlice, TensorSpec
from rlcore.spi.weights import ITEM_BYTES

Layout = tuple[tuple[ShardSlice, ...], ...]
"""The parts of each rank."""


def whole_slice(spec: TensorSpec) -> ShardSlice:
    """Return the slice that is the whole tensor."""
    return ShardSlice(spec.name, (0,) * len(spec.shape), spec.shape)


def common_refinement(wanted: Sequence[Sequence[ShardSlice]]) -> Layout:
    """Cut the parts of a layout where another rank's begin or end. Two cut parts are then equal or have nothing in common."""
    distinct: dict[str, dict[ShardSlice, None]] = defaultdict(dict)
    firsts = first_equal_ranks(wanted)
    for rank in dict.fromkeys(firsts):
        for box in wanted[rank]:
            distinct[box.name][box] = None
    cut = {name: _cells(list(boxes)) for name, boxes in distinct.items()}
    made = dict[int, tuple[ShardSlice, ...]]()
    for rank in dict.fromkeys(firsts):
        made[rank] = tuple(dict.fromkeys(cell for box in wanted[rank] for cell in cut[box.name][box]))
    return tuple(made[first] for first in firsts)


def first_equal_ranks(layout: Sequence[Sequence[ShardSlice]]) -> list[int]:
    """Return for each rank the first rank with the same parts in the same order: in large layouts most ranks repeat one."""
    first, known, found = dict[tuple[ShardSlice, ...], int](), dict[int, int](), list[int]()
    for rank, boxes in enumerate(layout):
        if id(boxes) not in known:
            known[id(boxes)] = first.setdefault(tuple(boxes), rank)
        found.append(known[id(boxes)])
    return found


def add_unwanted(specs: Sequence[TensorSpec], wanted: Sequence[Sequence[ShardSlice]]) -> Layout:
    """Add the parts that no rank wants, each to the rank that wants least. The layout is cut by `common_refinement`."""
    *cut, all_parts = common_refinement([*wanted, [whole_slice(spec) for spec in specs]])
    item_bytes = {spec.name: ITEM_BYTES[spec.dtype] for spec in specs}
    distinct = {id(boxes): boxes for boxes in cut}
    load_of = {key: sum(box.size * item_bytes[box.name] for box in boxes) for key, boxes in distinct.items()}
    loads = [load_of[id(boxes)] for boxes in cut]
    known, added = {box for boxes in distinct.values() for box in boxes}, defaultdict[int, list[ShardSlice]](list)
    for box in all_parts:
        if box not in known:
            rank = min(range(len(loads)), key=loads.__getitem__)
            added[rank].append(box)
            loads[rank] += box.size * item_bytes[box.name]
    return tuple((*boxes, *added[rank]) if rank in added else boxes for rank, boxes in enumerate(cut))


def joined(boxes: Iterable[ShardSlice]) -> list[ShardSlice]:
    """Return the fewest parts of one tensor, without common elements, that hold all of these and what lies between two that
    overlap."""
    found = list[ShardSlice]()
    for each in sorted(set(boxes)):
        box = each
        while (other := next((other for other in found if _make_one(box, other)), None)) is not None:
            found.remove(other)
            box = _hull(box, other)
        found.append(box)
    return sorted(found)


def _cells(boxes: Sequence[ShardSlice]) -> dict[ShardSlice, tuple[ShardSlice, ...]]:
    """Cut each of these parts of one tensor into cells."""
    if not overlap(boxes):
        return {box: (box,) for box in boxes}
    bounds = [
        sorted({bound for box in boxes for bound in (box.start[dim], box.stop[dim])}) for dim in range(len(boxes[0].start))
    ]
    return {box: tuple(_cells_of(box, bounds)) for box in boxes}


def _cells_of(box: ShardSlice, bounds: Sequence[Sequence[int]]) -> Iterator[ShardSlice]:
    runs = [
        list(pairwise(each[bisect_left(each, start) : bisect_right(each, stop)]))
        for each, start, stop in zip(bounds, box.start, box.stop, strict=True)
    ]
    if all(len(run) == 1 for run in runs):
        yield box
        return
    for cell in product(*runs):
        yield ShardSlice(box.name, tuple(start for start, _ in cell), tuple(stop for _, stop in cell))


def overlap(boxes: Sequence[ShardSlice]) -> bool:
    """Return whether two parts of one tensor have an element in common; those are compared alone whose rows meet."""
    alive: list[ShardSlice] = []
    for box in sorted((box for box in boxes if box.size), key=lambda box: (box.start, box.stop)):
        alive = [other for other in alive if not box.start or other.stop[0] > box.start[0]]
        if any(_meet(box, other) for other in alive):
            return True
        alive.append(box)
    return False


def _meet(box: ShardSlice, other: ShardSlice) -> bool:
    """Return whether two parts, neither of them empty, have an element in common."""
    start, stop = map(max, box.start, other.start), map(min, box.stop, other.stop)
    return all(map(lt, start, stop))


def _make_one(box: ShardSlice, other: ShardSlice) -> bool:
    """Return whether they overlap, or lie side by side with equal extents in all other dimensions."""
    if box.common(other).size:
        return True
    ranges = zip(box.start, box.stop, other.start, other.stop, strict=True)
    differing = [each for each in ranges if each[:2] != each[2:]]
    return len(differing) == 1 and max(differing[0][0], differing[0][2]) == min(differing[0][1], differing[0][3])


def _hull(box: ShardSlice, other: ShardSlice) -> ShardSlice:
    return ShardSlice(box.name, tuple(map(min, box.start, other.start)), tuple(map(max, box.stop, other.stop)))
