"""Bytes as people read them."""

import pytest

from rlcore_torchkit.distributed.format_bytes import GIB, gib


@pytest.mark.parametrize(("size", "text"), [(GIB, "1.0 GiB"), (1.25 * GIB, "1.2 GiB"), (2**20, "1.0 MiB"), (0, "0.0 MiB")])
def test_small_numbers_are_told_in_mebibytes(size: float, text: str) -> None:
    assert gib(size) == text
