"""A feed that looks at the environment's work while the generator waits."""

from typing import Any

from rlcore.spi import RewardError
from rlcore_rollout.request_queue import RequestQueue


class Work:
    """Fails at its third poll."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.num_polls = fails, 0

    def poll(self, timeout_s: float) -> bool:
        self.num_polls += 1
        if self.fails and self.num_polls == 3:
            raise RewardError("no judge")
        return False


def feed_beside(work: Any, may_go_on: Any = lambda: True) -> RequestQueue:
    feed = RequestQueue(lambda _: None)
    feed.begin(0, lambda: not work.poll(0.0) and may_go_on())
    return feed


def test_an_error_of_the_work_ends_the_stream_and_is_told_once_behind_it() -> None:
    feed = feed_beside(Work(fails=True))
    assert feed.take(wait=True) is None  # the generator waits in vain until then
    assert isinstance(feed.failure(), RewardError)
    assert feed.failure() is None


def test_the_stream_ends_where_nothing_may_go_on() -> None:
    work = Work(fails=False)
    feed = feed_beside(work, may_go_on=lambda: work.num_polls < 2)
    assert feed.take(wait=True) is None
    assert feed.failure() is None
    assert work.num_polls == 2
