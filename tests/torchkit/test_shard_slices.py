"""Parts that are cut and joined hold the same elements as before."""

from itertools import combinations

import numpy as np
import pytest

from rlcore.spi import ShardSlice, TensorSpec
from rlcore_torchkit.refit.shard_slices import add_unwanted, common_refinement, joined, whole_slice

SPECS = (TensorSpec(name="w", shape=(8, 6), dtype="float32"), TensorSpec(name="v", shape=(5,), dtype="bfloat16"))
W, V = map(whole_slice, SPECS)


def rows(start: int, stop: int) -> ShardSlice:
    return ShardSlice("w", (start, 0), (stop, 6))


def columns(start: int, stop: int) -> ShardSlice:
    return ShardSlice("w", (0, start), (8, stop))


def counts(boxes: list[ShardSlice] | tuple[ShardSlice, ...]) -> np.ndarray:
    """How often each element of `w` is in them, int [8, 6]."""
    found = np.zeros((8, 6), int)
    for box in boxes:
        if box.name == "w":
            found[box.within(W)] += 1
    return found


@pytest.mark.parametrize(
    "layout",
    [
        [[rows(0, 4)], [rows(4, 8)]],
        [[W], [rows(4, 8)], [rows(2, 4), V]],
        [[columns(0, 3)], [rows(0, 4)], [columns(3, 6), V]],
        [[rows(0, 5)], [rows(3, 8)], [W]],
    ],
)
def test_cut_parts_hold_what_they_did_and_are_equal_or_apart(layout: list[list[ShardSlice]]) -> None:
    cut = common_refinement(layout)
    for before, after in zip(layout, cut, strict=True):
        assert (counts(after) == counts(before)).all()
        assert (V in after) == (V in before)
    for one, other in combinations({box for boxes in cut for box in boxes}, 2):
        assert one.name != other.name or not one.common(other).size


def test_parts_of_which_none_overlap_stay_as_they_are() -> None:
    layout = ((rows(0, 4), V), (rows(4, 8), V), (rows(0, 4),))
    assert common_refinement(layout) == layout


def test_what_no_rank_wants_goes_to_the_one_that_wants_least() -> None:
    completed = add_unwanted(SPECS, [[rows(0, 3), V], [rows(3, 5)]])
    assert completed == ((rows(0, 3), V), (rows(3, 5), rows(5, 8)))
    assert add_unwanted(SPECS, [[], [W]]) == ((V,), (W,))


def test_ranks_that_want_everything_together_get_nothing_more() -> None:
    layout = ((rows(0, 4), V), (rows(4, 8), V))
    assert add_unwanted(SPECS, layout) == layout


@pytest.mark.parametrize(
    ("boxes", "expected"),
    [
        ([], []),
        ([rows(0, 2), rows(2, 4), rows(4, 8)], [W]),
        ([rows(0, 2), rows(4, 8), rows(0, 2)], [rows(0, 2), rows(4, 8)]),
        ([columns(0, 2), columns(1, 4)], [columns(0, 4)]),
        ([rows(0, 2), columns(0, 2)], [W]),
        ([rows(0, 2), ShardSlice("w", (2, 0), (3, 2))], [rows(0, 2), ShardSlice("w", (2, 0), (3, 2))]),
        ([rows(0, 2), rows(4, 6), rows(2, 4)], [rows(0, 6)]),
    ],
)
def test_parts_are_joined_where_they_make_one(boxes: list[ShardSlice], expected: list[ShardSlice]) -> None:
    assert joined(boxes) == expected


def test_a_tensor_without_dimensions() -> None:
    spec = TensorSpec(name="s", shape=(), dtype="float32")
    whole = whole_slice(spec)
    assert common_refinement([[whole], [whole]]) == ((whole,), (whole,))
    assert add_unwanted((spec,), [[], []]) == ((whole,), ())
    assert joined([whole, whole]) == [whole]
