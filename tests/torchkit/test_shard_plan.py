"""Plans of shards, held against the elements themselves."""

from collections import defaultdict
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.spi import RefitError
from rlcore.spi.weights import TensorSpec
from rlcore_torchkit.refit.shard_plan import Piece, ShardSlice, plan_pieces
from rlcore_torchkit.refit.shard_slices import add_unwanted, common_refinement

from .plain_shard_plan import plain_cuts, plain_pieces, plain_rest  # type: ignore[import-not-found]

SPEC = TensorSpec(name="w", shape=(8, 6), dtype="bfloat16")
WHOLE = ShardSlice("w", (0, 0), (8, 6))


def rows(start: int, stop: int) -> ShardSlice:
    return ShardSlice("w", (start, 0), (stop, 6))


@st.composite
def layouts(draw: st.DrawFn, specs: tuple[TensorSpec, ...], num_ranks: int) -> list[list[ShardSlice]]:
    """Each tensor cut by a grid, and each part of it on one rank or on several."""
    held: list[list[ShardSlice]] = [[] for _ in range(num_ranks)]
    for spec in specs:
        cuts = [sorted({0, extent, *draw(st.lists(st.integers(0, extent), max_size=2))}) for extent in spec.shape]
        for ranges in product(*(list(pairwise(cut)) for cut in cuts)):
            box = ShardSlice(spec.name, tuple(a for a, _ in ranges), tuple(b for _, b in ranges))
            for rank in draw(st.sets(st.integers(0, num_ranks - 1), min_size=1)):
                held[rank].append(box)
    return held


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[TensorSpec, ...], list[list[ShardSlice]], list[list[ShardSlice]], int]:
    shapes = draw(st.lists(st.lists(st.integers(1, 9), min_size=0, max_size=3), min_size=1, max_size=3))
    specs = tuple(TensorSpec(name=f"t{n}", shape=tuple(shape), dtype="float32") for n, shape in enumerate(shapes))
    held = draw(layouts(specs, draw(st.integers(1, 4))))
    return specs, held, draw(layouts(specs, draw(st.integers(1, 4)))), draw(st.integers(4, 400))


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_every_element_once_and_from_one_of_its_holders(
    case: tuple[tuple[TensorSpec, ...], list[list[ShardSlice]], list[list[ShardSlice]], int],
) -> None:
    specs, held, wanted, max_bytes = case
    pieces = plan_pieces(specs, held, wanted, max_bytes)
    arrived = {(rank, box): np.zeros(box.shape, int) for rank, boxes in enumerate(wanted) for box in boxes}
    senders = {spec.name: np.full(spec.shape, -1) for spec in specs}
    for piece in pieces:
        assert piece.held in held[piece.sender]
        assert piece.box.common(piece.held) == piece.box == piece.box.common(piece.wanted)
        for receiver in piece.receivers:
            arrived[receiver, piece.wanted][piece.box.within(piece.wanted)] += 1
        place = tuple(map(slice, piece.box.start, piece.box.stop))
        assert np.isin(senders[piece.box.name][place], (-1, piece.sender)).all()
        senders[piece.box.name][place] = piece.sender
        assert piece.num_bytes == 4 * piece.box.size
    assert all((counts == 1).all() for counts in arrived.values())
    leaving = [(piece.box.name, piece.box, piece.wanted) for piece in pieces]
    assert len({*leaving}) == len(leaving), "sent once, whoever wants it"


@settings(max_examples=100, deadline=None)
@given(case=cases(), engines=st.integers(1, 3))
def test_plans_are_those_of_the_plain_computation(
    case: tuple[tuple[TensorSpec, ...], list[list[ShardSlice]], list[list[ShardSlice]], int], engines: int
) -> None:
    """With engines whose ranks want the same, in one list or in lists that are equal."""
    specs, held, wanted, max_bytes = case
    for several in (wanted * engines, [list(boxes) for _ in range(engines) for boxes in wanted]):
        assert plan_pieces(specs, held, several, max_bytes) == plain_pieces(specs, held, several, max_bytes)


def by_rows(spec: TensorSpec, place: int, num_ranks: int, dim: int = 0) -> ShardSlice:
    start, stop = [0] * len(spec.shape), list(spec.shape)
    start[dim], stop[dim] = (spec.shape[dim] * each // num_ranks for each in (place, place + 1))
    return ShardSlice(spec.name, tuple(start), tuple(stop))


LAYERS = tuple(
    TensorSpec(name=f"{layer}.{name}", shape=shape, dtype=dtype)
    for layer in range(2)
    for name, shape, dtype in (
        ("norm", (16,), "float32"),
        ("q", (32, 16), "bfloat16"),
        ("o", (16, 32), "bfloat16"),
        ("experts.0", (24, 16), "bfloat16"),
        ("experts.1", (24, 16), "bfloat16"),
        ("scale", (), "float32"),
    )
)
SMALL = TensorSpec(name="odd", shape=(3, 5), dtype="bfloat16")


def whole_of(specs: tuple[TensorSpec, ...]) -> list[ShardSlice]:
    return [ShardSlice(spec.name, (0,) * len(spec.shape), spec.shape) for spec in specs]


def divided(specs: tuple[TensorSpec, ...], place: int, num_ranks: int) -> list[ShardSlice]:
    """Rows of most tensors, columns of "o", and of "norm" and "scale" all, as tensor ranks hold and read them."""
    return [
        ShardSlice(spec.name, (0,) * len(spec.shape), spec.shape)
        if len(spec.shape) < 2
        else by_rows(spec, place, num_ranks, dim=int(spec.name.endswith("o")))
        for spec in specs
    ]


def of_experts(specs: tuple[TensorSpec, ...], place: int) -> list[ShardSlice]:
    return [box for box in whole_of(specs) if "experts" not in box.name or box.name.endswith(str(place))]


FSDP = [[by_rows(spec, rank, 8) if spec.shape else whole_of((spec,))[0] for spec in LAYERS] for rank in range(8)]
LAYOUTS = {
    "one to one": (LAYERS, [whole_of(LAYERS)], [whole_of(LAYERS)]),
    "rows, to whole": (LAYERS, FSDP, [whole_of(LAYERS)] * 4),
    "rows, to tensor ranks": (LAYERS, FSDP, [divided(LAYERS, rank % 4, 4) for rank in range(8)]),
    "rows, to ranks of experts": (LAYERS, FSDP, [of_experts(LAYERS, rank % 2) for rank in range(6)]),
    "replicas of tensor ranks, to others": (
        LAYERS,
        [divided(LAYERS, rank % 2, 2) for rank in range(6)],
        [divided(LAYERS, rank % 4, 4) for rank in range(8)],
    ),
    "columns, to rows": (LAYERS[2:3], [divided(LAYERS[2:3], rank, 4) for rank in range(4)], [[by_rows(LAYERS[2], 1, 2)]]),
    "fewer rows than ranks, to engines of two kinds": (
        (SMALL, *LAYERS),
        [[by_rows(spec, rank, 8) if spec.shape else whole_of((spec,))[0] for spec in (SMALL, *LAYERS)] for rank in range(8)],
        [*(divided(LAYERS, rank, 2) for rank in range(2)), *(divided(LAYERS, rank, 3) for rank in range(3))],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("max_bytes", [64, 400, 10**6])
def test_layouts_of_trainers_and_engines_are_planned_as_by_the_plain_computation(name: str, max_bytes: int) -> None:
    specs, held, read = LAYOUTS[name]
    wanted = add_unwanted(specs, read)
    assert wanted == plain_rest(specs, read)
    assert common_refinement(read) == plain_cuts(read)
    assert common_refinement(wanted) == wanted
    assert plan_pieces(specs, held, wanted, max_bytes) == plain_pieces(specs, held, wanted, max_bytes)


def loads(pieces: tuple[Piece, ...]) -> dict[int, int]:
    found: dict[int, int] = defaultdict(int)
    for piece in pieces:
        found[piece.sender] += piece.num_bytes
    return found


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12), num_ranks=st.integers(1, 5), receivers=st.integers(1, 3))
def test_replicas_share_what_is_sent_evenly(sizes: list[int], num_ranks: int, receivers: int) -> None:
    """Where all hold all, to within what is sent of one block; and once, however many want it."""
    specs = tuple(TensorSpec(name=f"t{n}", shape=(size, 2), dtype="float32") for n, size in enumerate(sizes))
    boxes = [ShardSlice(spec.name, (0, 0), spec.shape) for spec in specs]
    sent = loads(plan_pieces(specs, [boxes] * num_ranks, [boxes] * receivers, 64))
    assert sum(sent.values()) == sum(sizes) * 8
    each = [sent[rank] for rank in range(num_ranks)]
    assert max(each) - min(each) <= 64


def test_shards_that_no_holder_can_choose_are_counted_first() -> None:
    """Rank 0 alone has the first half, so its replica sends the other."""
    pieces = plan_pieces((SPEC,), [[rows(0, 4), rows(4, 8)], [rows(4, 8)]], [[WHOLE]], 10**6)
    assert {piece.box: piece.sender for piece in pieces} == {rows(0, 4): 0, rows(4, 8): 1}


@pytest.mark.parametrize(
    ("held", "wanted", "message"),
    [
        ([[rows(0, 4)], [rows(5, 8)]], [[WHOLE]], "rank 0 wants 48 elements of w, of which 42 are held"),
        ([[rows(0, 5)], [rows(4, 8)]], [[WHOLE]], "w is held in parts that overlap"),
        ([[WHOLE, WHOLE]], [[WHOLE]], "rank 0 lists a held part of w 2 times"),
        ([[WHOLE]], [[WHOLE], [WHOLE, WHOLE]], "rank 1 lists a wanted part of w 2 times"),
        ([[WHOLE]], [[rows(0, 9)]], r"w is wanted by rank 0 from \(0, 0\) to \(9, 6\), outside of \(8, 6\)"),
        ([[WHOLE]], [[ShardSlice("w", (0,), (8,))]], "outside of"),
        ([[WHOLE]], [[ShardSlice("v", (0,), (8,))]], "v is wanted by rank 0 but not announced"),
    ],
)
def test_layouts_that_do_not_fit(held: list[list[ShardSlice]], wanted: list[list[ShardSlice]], message: str) -> None:
    with pytest.raises(RefitError, match=message):
        plan_pieces((SPEC,), held, wanted, 10**6)
