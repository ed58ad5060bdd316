"""Streams in a thread of their own: what they raise is raised to whoever ends them."""

import threading
import time
from typing import Any

import pytest

from rlcore.spi import WorkerError
from rlcore.spi.execution import ResponseFeed
from rlcore_rollout.background_stream import BackgroundStream
from rlcore_rollout.request_queue import RequestQueue


class Waits:
    """Waits for the feed's end, and counts its streams."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    def stream(self, feed: ResponseFeed, weight_version: int) -> None:
        self.versions.append(weight_version)
        while feed.take(wait=True) is not None:
            pass


class Dies:
    def stream(self, feed: ResponseFeed, weight_version: int) -> None:
        raise WorkerError("engine 0 died")


def begun(generator: Any, ended: threading.Event) -> tuple[BackgroundStream, RequestQueue]:
    feed = RequestQueue(lambda _: None)
    stream = BackgroundStream(feed, ended.set)
    feed.begin(3)
    stream.begin(generator, 3)
    return stream, feed


def test_one_stream_after_another_runs_beside_its_caller() -> None:
    generator, ended = Waits(), threading.Event()
    stream, feed = begun(generator, ended)
    assert stream.has_begun
    assert not ended.is_set()
    stream.end()
    assert ended.is_set()
    assert not stream.has_begun
    feed.begin(4)
    stream.begin(generator, 4)
    stream.end()
    assert generator.versions == [3, 4]


def test_what_it_raises_is_raised_once_at_its_end() -> None:
    ended = threading.Event()
    stream, _ = begun(Dies(), ended)
    assert ended.wait(300)
    assert stream.has_failed
    with pytest.raises(WorkerError, match="engine 0"):
        stream.end()
    stream.end()
    assert not stream.has_failed


class Late(Waits):
    """Looks at the feed after a while."""

    is_at_it = False

    def stream(self, feed: ResponseFeed, weight_version: int) -> None:
        time.sleep(0.05)
        self.is_at_it = True
        super().stream(feed, weight_version)


def test_it_has_begun_once_the_generator_is_at_it() -> None:
    """What changes the weights next finds a stream that began with those before."""
    generator = Late()
    stream, _ = begun(generator, threading.Event())
    assert generator.is_at_it
    stream.end()


@pytest.mark.parametrize("error", [ValueError("planted"), SystemExit(3)], ids=["Exception", "SystemExit"])
def test_what_is_raised_once_it_has_ended_is_raised_too(error: BaseException) -> None:
    def fail() -> None:
        raise error

    feed = RequestQueue(lambda _: None)
    stream = BackgroundStream(feed, fail)
    feed.begin(3)
    stream.begin(Waits(), 3)  # type: ignore[arg-type]
    with pytest.raises(type(error)):
        stream.end()
