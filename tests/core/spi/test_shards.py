"""Parts of tensors."""

from rlcore.spi import ShardSlice

BOX = ShardSlice("w", (2, 0), (6, 3))


def test_a_box_knows_its_shape_and_what_it_shares_with_another():
    assert (BOX.shape, BOX.size) == ((4, 3), 12)
    assert BOX.common(ShardSlice("w", (4, 1), (9, 2))) == ShardSlice("w", (4, 1), (6, 2))
    assert BOX.common(ShardSlice("w", (6, 0), (9, 3))).size == 0
    assert ShardSlice("scalar", (), ()).size == 1


def test_a_box_lies_in_another_by_slices():
    assert ShardSlice("w", (3, 1), (5, 3)).within(BOX) == (slice(1, 3), slice(1, 3))
