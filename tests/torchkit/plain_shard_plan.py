"""Plans of shards as they are defined, worked out rank by rank and box by box; only of layouts in which nothing is wrong."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise, product

from rlcore.spi import ShardSlice, TensorSpec
from rlcore.spi.weights import ITEM_BYTES
from rlcore_torchkit.refit.shard_plan import Piece

Layout = Sequence[Sequence[ShardSlice]]


def plain_pieces(specs: Sequence[TensorSpec], held: Layout, wanted: Layout, max_piece_bytes: int) -> tuple[Piece, ...]:
    """What `plan_pieces` has to come to, in its order."""
    item_bytes = {spec.name: ITEM_BYTES[spec.dtype] for spec in specs}
    holders, receivers = _ranks_by_box(held), _ranks_by_box(wanted)
    blocks = []
    for part, ranks in holders.items():
        max_elements = max(1, max_piece_bytes // item_bytes[part.name])
        for block in _blocks(part, max_elements):
            common = [(block.common(box), box, tuple(takers)) for box, takers in receivers.items() if box.name == part.name]
            blocks.append((part, ranks, [each for each in common if each[0].size]))
    # By tensors, as they are held first, since equal blocks go in that order.
    names = list(dict.fromkeys(box.name for boxes in held for box in boxes))
    blocks.sort(key=lambda block: names.index(block[0].name))

    def num_bytes(block: tuple[ShardSlice, list[int], list[tuple[ShardSlice, ShardSlice, tuple[int, ...]]]]) -> int:
        return sum(box.size * item_bytes[box.name] for box, _, _ in block[2])

    loads, pieces = [0] * len(held), []
    for block in sorted(blocks, key=lambda block: (len(block[1]) > 1, -num_bytes(block), block[0])):
        part, ranks, taken = block
        sender = min(ranks, key=loads.__getitem__)
        loads[sender] += num_bytes(block)
        for box, want, takers in taken:
            size = box.size * item_bytes[box.name]
            pieces.append(Piece(box=box, held=part, wanted=want, sender=sender, receivers=takers, num_bytes=size))
    return tuple(pieces)


def plain_cuts(wanted: Layout) -> tuple[tuple[ShardSlice, ...], ...]:
    """What `common_refinement` has to come to."""
    boxes = _ranks_by_box(wanted)
    cut = {box: _cells(box, [other for other in boxes if other.name == box.name]) for box in boxes}
    return tuple(tuple(dict.fromkeys(cell for box in own for cell in cut[box])) for own in wanted)


def plain_rest(specs: Sequence[TensorSpec], wanted: Layout) -> tuple[tuple[ShardSlice, ...], ...]:
    """What `add_unwanted` has to come to."""
    whole = [ShardSlice(spec.name, (0,) * len(spec.shape), spec.shape) for spec in specs]
    item_bytes = {spec.name: ITEM_BYTES[spec.dtype] for spec in specs}
    *cut, all_parts = plain_cuts([*wanted, whole])
    completed = [list(boxes) for boxes in cut]
    for box in all_parts:
        if not any(box in boxes for boxes in cut):
            loads = [sum(each.size * item_bytes[each.name] for each in boxes) for boxes in completed]
            completed[loads.index(min(loads))].append(box)
    return tuple(map(tuple, completed))


def _ranks_by_box(layout: Layout) -> dict[ShardSlice, list[int]]:
    found: dict[ShardSlice, list[int]] = defaultdict(list)
    for rank, boxes in enumerate(layout):
        for box in boxes:
            found[box].append(rank)
    return found


def _blocks(box: ShardSlice, max_elements: int) -> list[ShardSlice]:
    """Runs of rows of at most so many elements, or single rows."""
    if not box.start or box.size <= max_elements:
        return [box]
    rows = max(1, max_elements * box.shape[0] // box.size)
    firsts = range(box.start[0], box.stop[0], rows)
    stops = [min(first + rows, box.stop[0]) for first in firsts]
    return [
        ShardSlice(box.name, (first, *box.start[1:]), (stop, *box.stop[1:])) for first, stop in zip(firsts, stops, strict=True)
    ]


def _cells(box: ShardSlice, all_boxes: Sequence[ShardSlice]) -> list[ShardSlice]:
    """What a part is cut into, where parts of its tensor overlap; else itself."""
    if not any(one.common(other).size for one in all_boxes for other in all_boxes if one != other):
        return [box]
    runs = []
    for dim, (start, stop) in enumerate(zip(box.start, box.stop, strict=True)):
        bounds = sorted({bound for each in all_boxes for bound in (each.start[dim], each.stop[dim]) if start <= bound <= stop})
        runs.append(list(pairwise(bounds)))
    return [ShardSlice(box.name, tuple(a for a, _ in cell), tuple(b for _, b in cell)) for cell in product(*runs)]
