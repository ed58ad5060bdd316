"""Garbage collection during a step."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from rlcore_rollout import gc_tuning
from rlcore_rollout.gc_tuning import MANY, only_young_collections, step_begins, step_ends


class Circle:
    """An object that only a search for cycles frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def by_itself() -> Iterator[None]:
    """No search but those that are asked for."""
    gc.collect()
    gc.disable()
    yield
    step_ends()
    gc.enable()


def test_collections_are_as_before_after_a_step_that_fails() -> None:
    before = gc.get_threshold()
    try:
        with only_young_collections():
            assert gc.get_threshold()[:2] == before[:2]
            assert gc.get_threshold()[2] > 10**6
            raise RuntimeError
    except RuntimeError:
        assert gc.get_threshold() == before


@pytest.mark.usefixtures("by_itself")
def test_what_there_is_when_a_step_begins_is_searched_once_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc_tuning, "next_search_at", 0.0)
    before = weakref.ref(Circle())
    step_begins(MANY)
    since = weakref.ref(Circle())
    gc.collect()
    assert since() is None
    assert before() is not None
    step_ends()
    assert before() is None


@pytest.mark.usefixtures("by_itself")
def test_searches_of_all_objects_take_a_small_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]

    def collect() -> int:
        now[0] += 2.0
        searched.append(now[0])
        return 0

    searched: list[float] = []
    monkeypatch.setattr(gc_tuning, "next_search_at", 0.0)
    monkeypatch.setattr(gc_tuning.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(gc_tuning.gc, "collect", collect)
    for _ in range(5000):
        step_begins(MANY)
        step_ends()
        now[0] += 1.0
    assert len(searched) == 3
    step_ends()
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("by_itself")
def test_few_samples_hide_nothing_from_a_search() -> None:
    """Backends of this process free what cycles hold between two phases of a step."""
    before = weakref.ref(Circle())
    step_begins(MANY - 1)
    gc.collect()
    assert before() is None
