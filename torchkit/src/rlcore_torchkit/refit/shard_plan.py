"""Plans which part of which tensor goes from which rank to which ones, from the layouts of both sides; imports no torch."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from operator import lt

from attrs import frozen

from rlcore.schema.suggestions import listed
from rlcore.spi import RefitError
from rlcore.spi.weights import ITEM_BYTES, TensorSpec
from rlcore.spi.weights import ShardSlice as ShardSlice
from rlcore_torchkit.refit.shard_slices import overlap

_MAX_NAMED = 5


@frozen(kw_only=True)
class Piece:
    """One transfer: a slice that one trainer rank sends to some generator ranks, which all want it in equal parts."""

    box: ShardSlice
    held: ShardSlice
    """The sender's part that contains it."""
    wanted: ShardSlice
    """The receivers' part that contains it."""
    sender: int
    """The number of the trainer's rank."""
    receivers: tuple[int, ...]
    """The numbers of the generator's ranks, ascending."""
    num_bytes: int


def plan_pieces(
    specs: Sequence[TensorSpec],
    held: Sequence[Sequence[ShardSlice]],
    wanted: Sequence[Sequence[ShardSlice]],
    max_piece_bytes: int,
) -> tuple[Piece, ...]:
    """Bring each trainer rank's `held` parts to each generator rank's `wanted` ones, every wanted element once.

    Held parts of different ranks are the same, as replicas are, or have nothing in common. Of replicas one sends each element,
    and the bytes sent are balanced over them. It sends it once, to all that want it in equal parts, and once more for each
    other part that it lies in. RefitError names all that is wrong with either layout.
    """
    by_name = {spec.name: spec for spec in specs}
    problems = list(_problems(by_name, held, "held")) + list(_problems(by_name, wanted, "wanted"))
    holders = _ranks_of(held)
    problems += [f"{name} is held in parts that overlap" for name, boxes in holders.items() if overlap(list(boxes))]
    if problems:
        raise RefitError(f"refit: no plan of shards: {listed(problems, _MAX_NAMED)}")
    receivers = _ranks_of(wanted)
    unassigned = [
        _Block(part, ranks, _parts(by_name[name], block, receivers.get(name, {})))
        for name, boxes in holders.items()
        for part, ranks in boxes.items()
        for block in _blocks(part, max(1, max_piece_bytes // ITEM_BYTES[by_name[name].dtype]))
    ]
    pieces = tuple(_assigned(unassigned, len(held)))
    _require_all(pieces, wanted, receivers)
    return pieces


@frozen
class _Part:
    """A future piece, whose sender is not chosen yet."""

    box: ShardSlice
    wanted: ShardSlice
    receivers: tuple[int, ...]
    num_bytes: int


@frozen(eq=False)
class _Block:
    """A block that one rank sends, to all that want some of it."""

    held: ShardSlice
    ranks: Sequence[int]
    parts: Sequence[_Part]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


def _ranks_of(layout: Sequence[Sequence[ShardSlice]]) -> dict[str, dict[ShardSlice, tuple[int, ...]]]:
    """The ranks of each part, ascending, by the tensors' names; names and parts in the order in which ranks list them."""
    sharing: dict[int, list[int]] = defaultdict(list)
    for rank, boxes in enumerate(layout):
        sharing[id(boxes)].append(rank)
    found: dict[str, dict[ShardSlice, tuple[tuple[int, ...], ...]]] = defaultdict(dict)
    for ranks in map(tuple, sharing.values()):
        one = (ranks,)
        for box in layout[ranks[0]]:
            of_name = found[box.name]
            several = of_name.get(box)
            of_name[box] = one if several is None else several + one
    joined = cache(lambda several: several[0] if len(several) == 1 else tuple(sorted(chain(*several))))
    return {name: {box: joined(several) for box, several in boxes.items()} for name, boxes in found.items()}


def _parts(spec: TensorSpec, block: ShardSlice, receivers: Mapping[ShardSlice, tuple[int, ...]]) -> list[_Part]:
    found = []
    for box, ranks in receivers.items():
        if box.start and (box.stop[0] <= block.start[0] or block.stop[0] <= box.start[0]):
            continue  # most have other rows
        start, stop = tuple(map(max, block.start, box.start)), tuple(map(min, block.stop, box.stop))
        if all(map(lt, start, stop)):
            common = block if start == block.start and stop == block.stop else ShardSlice(block.name, start, stop)
            found.append(_Part(common, box, ranks, common.size * ITEM_BYTES[spec.dtype]))
    return found


def _assigned(blocks: Sequence[_Block], num_ranks: int) -> Iterator[Piece]:
    """The largest first, each to the replica that sends least so far; those without a choice before all others."""
    loads = [0] * num_ranks
    for block in sorted(blocks, key=_turn):
        sender = min(block.ranks, key=loads.__getitem__)
        loads[sender] += block.num_bytes
        for part in block.parts:
            yield Piece(
                box=part.box,
                held=block.held,
                wanted=part.wanted,
                sender=sender,
                receivers=part.receivers,
                num_bytes=part.num_bytes,
            )


def _turn(block: _Block) -> tuple[bool, int, str, tuple[int, ...], tuple[int, ...]]:
    held = block.held
    return len(block.ranks) > 1, -block.num_bytes, held.name, held.start, held.stop


def _blocks(box: ShardSlice, max_elements: int) -> Iterator[ShardSlice]:
    """Runs of rows of at most so many elements, or single rows."""
    if not box.start or box.size <= max_elements:
        yield box
        return
    rows = max(1, max_elements * box.shape[0] // box.size)
    for first in range(box.start[0], box.stop[0], rows):
        yield ShardSlice(box.name, (first, *box.start[1:]), (min(first + rows, box.stop[0]), *box.stop[1:]))


def _problems(specs: Mapping[str, TensorSpec], layout: Sequence[Sequence[ShardSlice]], verb: str) -> Iterator[str]:
    sound: set[int] = set()
    for rank, boxes in enumerate(layout):
        if id(boxes) not in sound:  # ranks may share what was right already
            problems = list(_problems_of(specs, rank, boxes, verb))
            yield from problems
            sound |= set() if problems else {id(boxes)}


def _problems_of(specs: Mapping[str, TensorSpec], rank: int, boxes: Sequence[ShardSlice], verb: str) -> Iterator[str]:
    for box, count in Counter(boxes).items():
        if count > 1:
            yield f"rank {rank} lists a {verb} part of {box.name} {count} times"
        spec = specs.get(box.name)
        if spec is None:
            yield f"{box.name} is {verb} by rank {rank} but not announced"
        elif not _lies_in(box, spec.shape):
            yield f"{box.name} is {verb} by rank {rank} from {box.start} to {box.stop}, outside of {spec.shape}"


def _lies_in(box: ShardSlice, shape: tuple[int, ...]) -> bool:
    if not len(box.start) == len(box.stop) == len(shape):
        return False
    ends = zip(box.start, box.stop, shape, strict=True)
    return all(0 <= start <= stop <= extent for start, stop, extent in ends)


def _require_all(
    pieces: Sequence[Piece], wanted: Sequence[Sequence[ShardSlice]], receivers: Mapping[str, Mapping[ShardSlice, Sequence[int]]]
) -> None:
    """Since held parts do not overlap, what comes is whole where its size is; to all that want a part comes the same."""
    coming: Counter[ShardSlice] = Counter()
    for piece in pieces:
        coming[piece.wanted] += piece.box.size
    if all(coming[box] == box.size for boxes in receivers.values() for box in boxes):
        return
    missing = [
        f"rank {rank} wants {box.size} elements of {box.name}, of which {coming[box]} are held"
        for rank, boxes in enumerate(wanted)
        for box in boxes
        if coming[box] != box.size
    ]
    raise RefitError(f"refit: no plan of shards: {listed(missing, _MAX_NAMED)}")
