"""Streams of the fakes on two ranks of real Ray: what joins, what ends early, what goes on beside a stream, and what dies."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.spi import ContractError, FinishReason, WorkerError

from .stream_support import (  # type: ignore[import-not-found]
    LIMIT,
    Feed,
    Pool,
    alone,
    assert_nothing_runs,
    end_after,
    opened,
    streaming,
    wanted,
)

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.fixture(scope="module")
def pool(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """One pool for streams that leave it as it was."""
    with opened(tmp_path_factory.mktemp("pool")) as pool:
        yield pool


def test_what_joins_a_stream_is_generated_as_alone(pool: Pool) -> None:
    limits = {seed: 5 + seed for seed in range(12)}
    joined = iter(range(6, 12))

    def then(feed: Feed) -> None:
        feed.ask([wanted(seed, limits[seed]) for seed in islice(joined, 1)])
        end_after(12)(feed)

    feed = Feed(then)
    feed.begin(0)
    feed.ask([wanted(seed, limits[seed]) for seed in range(6)])
    pool.generator.stream(feed, 0)
    assert {seed: (one.tokens.tolist(), one.text) for seed, one in feed.found.items()} == alone(pool.generator, limits)
    assert all(one.tokens.flags.owndata or one.tokens.base.flags.owndata for one in feed.found.values()), "not in Ray's store"
    assert "stream on 2 ranks" in pool.progress.doing["generator"]
    assert_nothing_runs(pool)


def test_the_end_brings_back_what_has_not_ended_and_the_next_stream_goes_on(pool: Pool) -> None:
    feed = Feed(end_after(1))
    feed.begin(0)
    feed.ask([wanted(seed, 3 if seed == 0 else LIMIT) for seed in range(6)])
    pool.generator.stream(feed, 0)
    assert (feed.of(FinishReason.LENGTH), feed.of(FinishReason.ABORTED)) == ({0}, {1, 2, 3, 4, 5})
    assert feed.num_outstanding == 0
    whole = alone(pool.generator, {seed: max(1, len(one.tokens)) for seed, one in feed.found.items()})
    for seed, one in feed.found.items():
        assert one.tokens.tolist() == whole[seed][0][: len(one.tokens)]
    assert_nothing_runs(pool)


def test_what_a_generator_raises_is_raised_with_its_rank_and_leaves_the_pool_usable(pool: Pool) -> None:
    feed = Feed(lambda _: None)
    feed.begin(0)
    feed.ask([wanted(seed, 3) for seed in range(6)])
    with pytest.raises(ContractError, match="stream at weight version 5") as caught:
        pool.generator.stream(feed, 5)
    assert "raised on rank " in "\n".join(caught.value.__notes__)
    assert feed.num_outstanding == 6
    assert pool.generator.is_usable
    assert_nothing_runs(pool)


def test_ctrl_c_brings_back_what_has_not_ended_and_leaves_nothing_running(pool: Pool) -> None:
    class Pressed(Feed):
        """Ctrl-C comes while it waits for requests."""

        def take(self, *, wait: bool) -> Any:
            taken = super().take(wait=wait)
            if not taken:
                raise KeyboardInterrupt
            return taken

    feed = Pressed(lambda feed: feed.end())
    feed.begin(0)
    feed.ask([wanted(seed, 3 if seed == 0 else LIMIT) for seed in range(4)])
    with pytest.raises(KeyboardInterrupt):
        pool.generator.stream(feed, 0)
    assert feed.of(FinishReason.ABORTED) == {1, 2, 3}
    assert_nothing_runs(pool)


def test_a_train_step_and_a_refit_run_beside_a_stream(tmp_path: Path, installed: Path) -> None:
    fault = {"kind": '"wait"', "hook": '"train_step"', "rank": 0, "version": 0}
    faults = [f"trainer.ranked.fault.{name}={value}" for name, value in fault.items()]
    with opened(tmp_path, f"trainer.ranked.folder={tmp_path}", *faults) as pool, ThreadPoolExecutor(1) as executor:
        feed = Feed(lambda _: None)
        with streaming(pool, feed) as running:
            feed.ask([wanted(seed, LIMIT) for seed in range(2)])
            stepped = executor.submit(pool.train)
            while not (tmp_path / "done-0").exists():
                assert not stepped.done()
            feed.ask([wanted(seed, 3) for seed in range(2, 6)])
            for seed in range(2, 6):
                feed.wait_for(seed)
            assert not stepped.done(), "the step ended before the test had let it"
            (tmp_path / "go").touch()
            stepped.result()
            pool.refit(1)
            feed.ask([wanted(seed, 3) for seed in range(6, 10)])
            for seed in range(6, 10):
                feed.wait_for(seed)
            feed.end()
            running.result()
        before, after = ([feed.found[seed].weight_versions.tolist() for seed in part] for part in (range(2, 6), range(6, 10)))
        assert (before, after) == ([[0, 0, 0]] * 4, [[1, 1, 1]] * 4)
        over = [feed.found[seed].weight_versions for seed in range(2)]
        assert all((np.diff(versions) >= 0).all() for versions in over)
        assert pool.generator.is_usable


def test_a_worker_that_is_killed_ends_the_stream_and_its_samples_can_be_asked_for_again(
    tmp_path: Path, installed: Path
) -> None:
    feed = Feed(lambda _: None)
    died = pytest.raises(WorkerError, match=r"rank 1 \(node .*\) died")
    with died, opened(tmp_path) as pool, streaming(pool, feed) as running:
        feed.ask([wanted(seed, LIMIT if seed > 1 else 3) for seed in range(6)])
        feed.wait_for(0)
        os.kill(pool.generator.calls.workers[1].pid, signal.SIGKILL)
        running.result()
    assert not pool.generator.is_usable
    owed = feed.num_outstanding
    assert owed == 6 - len(feed.found) > 0
    feed.requeue()
    feed.begin(0)
    requests = feed.take(wait=True)
    assert requests is not None
    assert {int(seed) for request in requests for seed in request.seeds} == set(range(6)) - feed.found.keys()
    assert feed.num_outstanding == owed


def test_a_generator_that_hangs_is_named_with_the_line_where_it_is(tmp_path: Path, installed: Path) -> None:
    fault = {"kind": '"hang"', "hook": '"stream"', "rank": 1, "version": 0}
    options = ("cluster.call_timeout_s=4", *(f"generator.ranked.fault.{name}={value}" for name, value in fault.items()))
    feed = Feed(lambda _: None)
    with pytest.raises(WorkerError) as caught, opened(tmp_path, *options) as pool, streaming(pool, feed) as running:
        feed.ask([wanted(seed, 3) for seed in range(6)])
        running.result()
    message = str(caught.value)
    assert message.startswith("stream: no answer within 4 s from rank 1 (node ")
    assert "in stream, at " in message
    assert "ranked_fakes.py" in message
    assert feed.num_outstanding == 3, "those of the other rank have come"


def test_a_pool_that_is_closed_ends_its_stream(tmp_path: Path, installed: Path) -> None:
    feed = Feed(lambda _: None)
    with opened(tmp_path) as pool:
        feed.begin(0)
        executor = ThreadPoolExecutor(1)
        running = executor.submit(pool.generator.stream, feed, 0)
        feed.ask([wanted(seed, 3 if seed == 0 else LIMIT) for seed in range(6)])
        feed.wait_for(0)
    with pytest.raises(WorkerError):
        running.result(300)
    executor.shutdown()
    assert "collect" not in {thread.name for thread in threading.enumerate()}
