"""Engines that start while others move: they end up where these are."""

from concurrent.futures import Future
from typing import Any

import pytest

from rlcore.spi import WorkerError
from rlcore_vllm.replicas.device_placement import DevicePlacement


class Engine:
    """Where one is, after each move."""

    def __init__(self) -> None:
        self.places: list[tuple[bool, bool, bool]] = []
        self.is_dead = False

    def set_residency(self, *, weights: bool, cache: bool, discard_weights: bool) -> Future[int]:
        self.places.append((weights, cache, discard_weights))
        move: Future[int] = Future()
        if self.is_dead:
            move.set_exception(WorkerError("died"))
        else:
            move.set_result(weights + cache)
        return move


@pytest.fixture
def engines() -> Any:
    return [Engine(), Engine()]


def test_an_engine_that_starts_while_the_others_go_to_sleep_sleeps(engines: Any) -> None:
    places = DevicePlacement(engines)
    with places.starting([1], discard_weights=False):
        held = places.move(weights=False, cache=False, discard_weights=True)
        assert {engine: move.result() for engine, move in held.items()} == {0: 0}
        assert engines[1].places == []
    assert (engines[0].places, engines[1].places) == ([(False, False, True)], [(False, False, False)])
    places.move(weights=True, cache=False, discard_weights=False)
    assert [engine.places[-1] for engine in engines] == [(True, False, False)] * 2


def test_an_engine_that_starts_while_the_others_wake_is_awake(engines: Any) -> None:
    places = DevicePlacement(engines)
    places.move(weights=False, cache=False, discard_weights=True)
    with places.starting([1], discard_weights=True):
        places.move(weights=True, cache=False, discard_weights=False)
        places.move(weights=True, cache=True, discard_weights=False)
    assert (len(engines[0].places), len(engines[1].places)) == (3, 1), "as it starts it is on the device"


def test_an_engine_that_does_not_start_is_asked_for_nothing(engines: Any) -> None:
    places = DevicePlacement(engines)
    engines[1].is_dead = True
    with pytest.raises(WorkerError, match="no device"), places.starting([1], discard_weights=True):
        raise WorkerError("no device")
    assert places.move(weights=False, cache=False, discard_weights=False).keys() == {0}
    engines[1].is_dead = False
    with places.starting([0, 1], discard_weights=True):
        """They start at last."""
    assert places.move(weights=True, cache=True, discard_weights=False).keys() == {0, 1}


def test_an_engine_that_starts_beside_one_that_does_not_gives_way_too(engines: Any) -> None:
    places = DevicePlacement(engines)
    engines[1].is_dead = True
    with pytest.raises(WorkerError, match="no device"), places.starting([0, 1], discard_weights=True):
        raise WorkerError("no device")
    places.move(weights=False, cache=False, discard_weights=True)
    assert engines[0].places[-1] == (False, False, True)
