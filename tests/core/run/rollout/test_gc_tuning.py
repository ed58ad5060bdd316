"""Garbage collection during a step."""

import gc

from rlcore.run.rollout.gc_tuning import only_young_collections


def test_collections_are_as_before_after_a_step_that_fails() -> None:
    before = gc.get_threshold()
    try:
        with only_young_collections():
            assert gc.get_threshold()[:2] == before[:2]
            assert gc.get_threshold()[2] > 10**6
            raise RuntimeError
    except RuntimeError:
        assert gc.get_threshold() == before
