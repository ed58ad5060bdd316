"""Values of all ranks that are sent once, and again as soon as one of them differs."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

from rlcore_torchkit.distributed.cached_all_gather import MOST_KEPT, CachedAllGather

NUM_RANKS = 3


class Ranks:
    """Ranks in threads, and what each collective of theirs has sent."""

    def __init__(self) -> None:
        self._barrier, self._given = Barrier(NUM_RANKS, timeout=300), [None] * NUM_RANKS
        self.sent: list[tuple[Any, ...]] = []
        self.told = [self.made(rank) for rank in range(NUM_RANKS)]

    def made(self, rank: int) -> CachedAllGather[Any]:
        return CachedAllGather(lambda own: self._gathered(rank, own))

    def _gathered(self, rank: int, own: Any) -> list[Any]:
        self._given[rank] = own
        if self._barrier.wait() == 0:
            self.sent.append(tuple(self._given))
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found

    def tell(self, *values: Any) -> list[tuple[Any, ...]]:
        """What each rank hears of such values."""
        self.sent.clear()
        with ThreadPoolExecutor(NUM_RANKS) as pool:
            futures = [pool.submit(told.by_all, value) for told, value in zip(self.told, values, strict=True)]
            return [future.result(300) for future in futures]

    @property
    def sends_values(self) -> bool:
        return len(self.sent) == 2


def test_values_are_sent_once_and_again_where_one_differs() -> None:
    ranks = Ranks()
    first = ranks.tell(1, 2, None)
    assert first == [(1, 2, None)] * NUM_RANKS
    assert ranks.sends_values
    for _ in range(2):
        again = ranks.tell(1, 2, None)
        assert all(found is before for found, before in zip(again, first, strict=True))
        assert not ranks.sends_values
    assert ranks.tell(1, 3, None) == [(1, 3, None)] * NUM_RANKS, "two ranks have what they had"
    assert ranks.sends_values


def test_rounds_that_come_in_turn_are_told_once_each() -> None:
    ranks, kinds = Ranks(), ((1, 2, 2), (1, 3, 3), (1, 2, 3))
    for number in range(3):
        for values in kinds:
            assert ranks.tell(*values) == [values] * NUM_RANKS
            assert ranks.sends_values == (number == 0)


def test_a_rank_that_is_new_and_what_is_forgotten_are_told_all() -> None:
    ranks = Ranks()
    ranks.tell(1, 2, 3)
    ranks.told[1] = ranks.made(1)
    assert ranks.tell(1, 2, 3) == [(1, 2, 3)] * NUM_RANKS
    assert ranks.sends_values
    ranks.tell(1, 2, 3)
    assert not ranks.sends_values
    ranks.told[2].forget()
    ranks.tell(1, 2, 3)
    assert ranks.sends_values


def test_no_more_than_a_few_are_kept() -> None:
    ranks = Ranks()
    for value in range(MOST_KEPT + 1):
        ranks.tell(value, 0, 0)
    ranks.tell(1, 0, 0)
    assert not ranks.sends_values
    ranks.tell(0, 0, 0)
    assert ranks.sends_values
