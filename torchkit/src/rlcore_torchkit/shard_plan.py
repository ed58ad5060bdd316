"""Which part of which tensor goes from which rank to which ones, planned from the layouts of both sides; imports no torch."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from attrs import evolve, frozen

from rlcore.schema.listing import listed
from rlcore.spi import RefitError
from rlcore.spi.shards import Box as Box
from rlcore.spi.weights import ITEM_BYTES, TensorSpec
from rlcore_torchkit.box_cuts import overlap

_MAX_NAMED = 5


@frozen(kw_only=True)
class Piece:
    """What one rank sends at once, to all that want it in the same part of theirs."""

    box: Box
    held: Box
    """The sender's part that it is of."""
    wanted: Box
    """The receivers' part that it goes into."""
    sender: int
    """The number of the rank among the trainer's."""
    receivers: tuple[int, ...]
    """The numbers of the ranks among the generator's, ascending."""
    num_bytes: int


def plan_pieces(
    specs: Sequence[TensorSpec], held: Sequence[Sequence[Box]], wanted: Sequence[Sequence[Box]], max_piece_bytes: int
) -> tuple[Piece, ...]:
    """Bring each trainer rank's `held` parts to each generator rank's `wanted` ones, every wanted element once.

    Held parts of different ranks are the same, as replicas are, or have nothing in common. Of replicas one sends each element,
    and the bytes sent are balanced over them. It sends it once, to all that want it in equal parts, and once more for each
    other part that it lies in. RefitError names all that is wrong with either layout.
    """
    by_name = {spec.name: spec for spec in specs}
    problems = list(_problems(by_name, held, "held")) + list(_problems(by_name, wanted, "wanted"))
    holders: dict[str, dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, boxes in enumerate(held):
        for box in boxes:
            holders[box.name][box].append(rank)
    problems += [f"{name} is held in parts that overlap" for name, boxes in holders.items() if overlap(list(boxes))]
    if problems:
        raise RefitError(f"refit: no plan of shards: {listed(problems, _MAX_NAMED)}")
    receivers: dict[str, dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, boxes in enumerate(wanted):
        for box in boxes:
            receivers[box.name][box].append(rank)
    unassigned = [
        _Block(part, ranks, _pieces(by_name[name], block, part, receivers[name]))
        for name, boxes in holders.items()
        for part, ranks in boxes.items()
        for block in _blocks(part, max(1, max_piece_bytes // ITEM_BYTES[by_name[name].dtype]))
    ]
    pieces = tuple(_assigned(unassigned, len(held)))
    _require_all(pieces, wanted)
    return pieces


@frozen(eq=False)
class _Block:
    """What one rank sends, to all that want some of it."""

    held: Box
    ranks: Sequence[int]
    pieces: Sequence[Piece]
    """With the first rank as their sender."""

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)


def _pieces(spec: TensorSpec, block: Box, held: Box, receivers: Mapping[Box, Sequence[int]]) -> list[Piece]:
    found = []
    for box, ranks in receivers.items():
        if box.start and (box.stop[0] <= block.start[0] or block.stop[0] <= box.start[0]):
            continue  # most have other rows
        common = block.common(box)
        if size := common.size:
            num_bytes = size * ITEM_BYTES[spec.dtype]
            found.append(Piece(box=common, held=held, wanted=box, sender=0, receivers=tuple(ranks), num_bytes=num_bytes))
    return found


def _assigned(blocks: Sequence[_Block], num_ranks: int) -> Iterator[Piece]:
    """The largest first, each to the replica that sends least so far; those without a choice before all others."""
    loads = [0] * num_ranks
    for block in sorted(blocks, key=lambda block: (len(block.ranks) > 1, -block.num_bytes, block.held)):
        sender = min(block.ranks, key=loads.__getitem__)
        loads[sender] += block.num_bytes
        for piece in block.pieces:
            yield evolve(piece, sender=sender)


def _blocks(box: Box, max_elements: int) -> Iterator[Box]:
    """Runs of rows of at most so many elements, or single rows."""
    if not box.start or box.size <= max_elements:
        yield box
        return
    rows = max(1, max_elements * box.shape[0] // box.size)
    for first in range(box.start[0], box.stop[0], rows):
        yield Box(box.name, (first, *box.start[1:]), (min(first + rows, box.stop[0]), *box.stop[1:]))


def _problems(specs: Mapping[str, TensorSpec], layout: Sequence[Sequence[Box]], verb: str) -> Iterator[str]:
    for rank, boxes in enumerate(layout):
        for box, count in Counter(boxes).items():
            if count > 1:
                yield f"rank {rank} lists a {verb} part of {box.name} {count} times"
            spec = specs.get(box.name)
            if spec is None:
                yield f"{box.name} is {verb} by rank {rank} but not announced"
            elif not _lies_in(box, spec.shape):
                yield f"{box.name} is {verb} by rank {rank} from {box.start} to {box.stop}, outside of {spec.shape}"


def _lies_in(box: Box, shape: tuple[int, ...]) -> bool:
    if not len(box.start) == len(box.stop) == len(shape):
        return False
    return all(0 <= start <= stop <= extent for start, stop, extent in zip(box.start, box.stop, shape, strict=True))


def _require_all(pieces: Sequence[Piece], wanted: Sequence[Sequence[Box]]) -> None:
    """Since held parts do not overlap, what comes is whole where its size is."""
    coming: Counter[tuple[int, Box]] = Counter()
    for piece in pieces:
        size = piece.box.size
        for rank in piece.receivers:
            coming[rank, piece.wanted] += size
    missing = [
        f"rank {rank} wants {box.size} elements of {box.name}, of which {coming[rank, box]} are held"
        for rank, boxes in enumerate(wanted)
        for box in boxes
        if coming[rank, box] != box.size
    ]
    if missing:
        raise RefitError(f"refit: no plan of shards: {listed(missing, _MAX_NAMED)}")
