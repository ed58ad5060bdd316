"""Cores near a GPU."""

import os
from pathlib import Path

from rlcore_ray.affinity import bind_near, parse_cores


def test_cores_are_read_and_unknown_gpus_change_nothing(tmp_path: Path) -> None:
    assert parse_cores("0-2,8\n") == {0, 1, 2, 8}
    assert parse_cores("") == set()
    assert bind_near(("0",), tmp_path) == os.sched_getaffinity(0)
