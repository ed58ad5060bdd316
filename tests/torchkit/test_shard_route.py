"""Windows of a plan; `shard_transfer_ranks` goes through whole routes."""

import pytest

from rlcore.spi import RefitError, ShardSlice
from rlcore_torchkit.refit.shard_route import plan_windows, whole_slice

from .shard_threads import MAX_BYTES, SPECS, WHOLE  # type: ignore[import-not-found]


def test_windows_hold_the_tensors_in_order_within_the_limit() -> None:
    windows = plan_windows(SPECS, [WHOLE], [WHOLE], MAX_BYTES)
    assert [[spec.name for spec in window.specs] for window in windows] == [["a", "b"], ["c"]]
    for window in windows:
        boxes = [piece.box for bucket in window.buckets for piece in bucket.pieces]
        assert {box.name for box in boxes} == {spec.name for spec in window.specs}
        assert sum(box.size for box in boxes) == sum(whole_slice(spec).size for spec in window.specs)


def test_a_tensor_larger_than_the_limit_has_a_window_of_its_own() -> None:
    assert [len(window.specs) for window in plan_windows(SPECS, [WHOLE], [WHOLE], 8)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([WHOLE[:2]], "rank 0 wants 24 elements of c, of which 0 are held"),
        ([[*WHOLE, ShardSlice("d", (0,), (1,))]], "d is held by rank 0 but not announced"),
    ],
)
def test_a_missing_and_an_unknown_part_are_named(held: list[list[ShardSlice]], message: str) -> None:
    with pytest.raises(RefitError, match=message):
        plan_windows(SPECS, held, [WHOLE], MAX_BYTES)
