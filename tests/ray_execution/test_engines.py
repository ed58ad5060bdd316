"""Engines that fail while others go on: what they had to do is done by these, and they take part again once refitted."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from rlcore.run.execution.streams import not_begun
from rlcore.spi import FinishReason, SetResidencyRequest, WorkerError
from rlcore.spi.execution import EngineLimitError
from rlcore_ray import pool_stream
from rlcore_ray.calls import COLLECT
from rlcore_ray.config import RayConfig
from rlcore_ray.engines import Engines
from rlcore_ray.failures import WorkerInfo
from rlcore_ray.pool_stream import PoolStream
from rlcore_ray.worker_stream import Collected

from .conftest import Notes, read_metrics  # type: ignore[import-not-found]
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

Run = Callable[..., dict[str, Any]]


def kill_engine(folder: Path, rank: int) -> None:
    """And wait until it is gone, or waits to be noticed."""
    process = int((folder / f"generator-{rank}").read_text())
    os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + 300
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def engine_options(folder: Path) -> tuple[str, ...]:
    return "generator.ranked.engine=true", f"generator.ranked.folder={folder}"


def wait_for_notes(pool: Pool, number: int) -> None:
    deadline = time.monotonic() + 300
    while len(pool.progress.texts) < number:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def engines_of(pool: Pool) -> Engines:
    engines: Engines = pool.generator.engines
    return engines


class TwoHosts:
    """Stands for the calls of two ranks, which give back what they have at the stream's end, unless the second fails then."""

    def __init__(self, cluster: RayConfig) -> None:
        self.cluster, self.progress, self.is_usable = cluster, Notes(), True
        self.workers = [WorkerInfo(rank=rank, log_file=Path("none")) for rank in range(2)]
        self.ended, self.fails = threading.Event(), True
        self.begin()

    def begin(self) -> None:
        self.numbers: dict[int, list[int]] = {0: [], 1: []}
        self.ended.clear()

    def streaming(self, num_ranks: int) -> Any:
        assert num_ranks == 2
        return nullcontext()

    def beside(self, name: str, arguments: Mapping[int, tuple[Any, ...]], group: str = "") -> list[Any]:
        del group
        if name == "stream_add":
            for rank, (dealt,) in arguments.items():
                self.numbers[rank] += [number for numbers, _ in dealt for number in numbers.tolist()]
        if name == "stream_end":
            self.ended.set()
        return [None]

    def outcome_beside(self, name: str, rank: int, group: str) -> Any:
        assert (name, group) == ("stream_collect", COLLECT)
        assert self.ended.wait(300)
        if rank == 1 and self.fails:
            return WorkerError("engine 1 died")
        return Collected(parts=[(np.array(self.numbers[rank]), not_begun(len(self.numbers[rank])))], has_ended=True)

    def require_progress(self, *_: Any) -> None:
        """There is always some."""

    def lose(self, reason: str) -> None:
        self.is_usable = False


def ends_once_taken(feed: Feed) -> Any:
    """The feed, which ends when the generator looks for more."""

    def take(*, wait: bool) -> Any:
        taken = feed.take(wait=wait)
        feed.end()
        return taken

    return SimpleNamespace(take=take, deliver=feed.deliver, end=feed.end)


def test_at_the_end_of_a_stream_what_a_failed_engine_owes_has_not_begun() -> None:
    calls: Any = TwoHosts(RayConfig())
    engines = Engines(calls, [0, 1])
    feed = Feed(lambda _: None)

    feed.begin(0)
    feed.ask([wanted(seed, 3) for seed in range(6)])
    PoolStream(engines, ends_once_taken(feed)).run(0)
    assert feed.of(FinishReason.ABORTED) == set(range(6))
    assert (engines.living, feed.num_outstanding) == ([0], 0)
    assert len(calls.numbers[0]) == 3


def test_memory_that_the_driver_lacks_is_no_engines_failure_and_loses_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Any = TwoHosts(RayConfig())
    engines, feed = Engines(calls, [0, 1]), Feed(lambda _: None)

    def no_memory(_: object) -> None:
        raise MemoryError("of the driver")

    calls.fails = False
    feed.begin(0)
    feed.ask([wanted(seed, 3) for seed in range(6)])
    with monkeypatch.context() as patched, pytest.raises(MemoryError, match="of the driver"):
        patched.setattr(pool_stream, "deepcopy", no_memory)
        PoolStream(engines, ends_once_taken(feed)).run(0)
    assert (engines.living, calls.progress.texts, calls.is_usable) == ([0, 1], [], True)
    assert (feed.found, feed.num_outstanding) == ({}, 6)
    feed.requeue()
    feed.begin(0)
    calls.begin()
    PoolStream(engines, ends_once_taken(feed)).run(0)
    assert (feed.of(FinishReason.ABORTED), feed.num_outstanding) == (set(range(6)), 0)


class OneOut(TwoHosts):
    """The second rank takes no part, and is asked how it is: the third time it has died."""

    num_looks = 0

    def streaming(self, num_ranks: int) -> Any:
        assert num_ranks == 1
        return nullcontext()

    def beside(self, name: str, arguments: Mapping[int, tuple[Any, ...]], group: str = "") -> list[Any]:
        if name == "stream_standby":
            assert arguments == {1: ()}
            self.num_looks += 1
            if self.num_looks == 3:
                raise WorkerError("rank 1 died")
        return super().beside(name, arguments, group)


def test_a_rank_that_dies_while_it_takes_no_part_ends_the_stream_with_that_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_stream, "WATCH_S", 0.001)
    calls: Any = OneOut(RayConfig())
    engines, feed = Engines(calls, [0, 1]), Feed(lambda _: None)
    engines.take_out(1)
    feed.begin(0)
    feed.ask([wanted(seed, 3) for seed in range(6)])
    with pytest.raises(WorkerError, match="rank 1 died"):
        PoolStream(engines, feed).run(0)
    assert calls.ended.is_set()
    assert feed.of(FinishReason.ABORTED) == set(range(6)), "the other's samples have come back"


@pytest.mark.parametrize(
    ("error", "limit", "is_outlived", "in_refit"),
    [
        (WorkerError("died"), 1, True, True),
        (MemoryError(), 1, True, False),
        (ZeroDivisionError(), 1, False, False),
        (WorkerError("died"), 0, False, False),
    ],
)
def test_only_a_death_or_want_of_memory_is_outlived_and_only_where_that_is_wanted(
    error: Exception, limit: int, is_outlived: bool, in_refit: bool
) -> None:
    """In a refit a death alone, since it may be the trainer that wants memory."""
    calls: Any = TwoHosts(RayConfig(max_engine_restarts=limit))
    engines = Engines(calls, [0, 1])
    assert engines.outlive(error) == is_outlived
    outcomes = {0: "refitted", 1: error, 2: "hosts none"}
    survivors = engines.survivors(outcomes, is_shared=False)
    assert survivors == ({0: "refitted", 2: "hosts none"} if in_refit else outcomes)
    assert engines.living == ([0] if in_refit else [0, 1])


def test_a_refit_fails_as_a_whole_where_the_others_cannot_go_on() -> None:
    calls: Any = TwoHosts(RayConfig())
    engines, died = Engines(calls, [0, 1]), WorkerError("died")
    for outcomes, is_shared in (({0: died, 1: died}, False), ({0: "refitted", 1: died}, True)):
        assert engines.survivors(outcomes, is_shared=is_shared) == outcomes
    starting = SimpleNamespace(is_starting=True)
    assert engines.survivors({0: starting, 1: died}, is_shared=False) == {0: starting, 1: died}, "none would hold weights"
    stream: Any = None
    with engines.streaming(PoolStream(engines, stream)):
        assert engines.survivors({0: "refitted", 1: died}, is_shared=False) == {0: "refitted", 1: died}
        assert (engines.living, engines.not_awaited) == ([0, 1], frozenset())
        engines.take_out(1)  # its stream has failed
        assert engines.not_awaited == {1}
        assert engines.survivors({0: "refitted", 1: died}, is_shared=False) == {0: "refitted"}
    assert (engines.living, len(calls.progress.texts)) == ([0], 1)
    engines.take_out(0)
    assert engines.not_awaited == frozenset(), "someone has to generate"


def test_engines_that_are_out_cost_nothing_when_memory_moves() -> None:
    calls: Any = TwoHosts(RayConfig(max_engine_restarts=1))
    engines, died = Engines(calls, [0, 1]), WorkerError("died")
    for _ in range(3):
        assert engines.moved({0: 7, 1: died}) == {0: 7}
        assert (engines.living, len(calls.progress.texts)) == ([0], 1), "it has failed once"
    # After an error of memory a generator takes no refit either: see BackendHandle.
    for error in (ZeroDivisionError(), MemoryError()):
        assert engines.moved({0: error, 1: died}) == {0: error, 1: died}
        assert engines.moved({0: 7, 1: error}) == {0: 7, 1: error}
    assert engines.living == [0]
    assert engines.moved({0: died, 1: died}) == {}, "the next refit starts all of them"


def test_engines_of_slots_take_part_once_they_hold_weights_and_are_not_waited_for() -> None:
    calls: Any = TwoHosts(RayConfig())
    engines = Engines(calls, [0, 1], slots=(2, 3))
    assert (engines.living, engines.are_whole, engines.not_awaited) == ([0, 1], True, frozenset())
    one: Any = SimpleNamespace(workers=["engine 2"], lose=lambda _: None)
    engines.join(2, one, weight_version=0)
    assert (engines.living, engines.take_restarts()) == ([0, 1, 2], 0)
    engines.take_out(1)
    assert (engines.are_whole, engines.not_awaited) == (False, frozenset({1}))
    engines.leave(2, SimpleNamespace())  # another process than the one that takes part
    assert engines.living == [0, 2]
    engines.leave(2, one)
    assert engines.living == [0]
    assert not engines.take_out(0)
    assert calls.progress.texts == ["engine 2 takes part from now on"]


def test_failures_long_ago_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    calls: Any = TwoHosts(RayConfig(max_engine_restarts=2, engine_restart_window_s=10.0))
    engines = Engines(calls, [0, 1])
    for moment in (0.0, 6.0, 12.0, 18.0):
        now = moment
        engines.go_on(1, WorkerError("died.\nIts last lines"), "More")
    engines.go_on(0, WorkerError("died"), "more")
    assert " failed: died. More; it takes part again " in calls.progress.texts[1]
    assert "(2 of 2 restarts within 10 s)" in calls.progress.texts[1]
    with pytest.raises(EngineLimitError, match="failed 3 times .*: died"):
        engines.go_on(1, WorkerError("died"), "more")
    assert not calls.is_usable


# Tests on Ray come last, since it is shut down before the first one without it.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the engines of `shared` leave their process ids."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def shared(installed: Path, folder: Path) -> Iterator[Pool]:
    """One pool for tests that leave it with two engines that hold weights."""
    with opened(folder, "cluster.max_engine_restarts=9", *engine_options(folder)) as pool:
        yield pool


@pytest.fixture
def pool(local_ray: None, shared: Pool) -> Pool:
    shared.progress.texts.clear()
    return shared


def test_the_others_generate_what_an_engine_had_taken_and_it_joins_the_stream_again(pool: Pool, folder: Path) -> None:
    limits, feed = {seed: 5 + seed for seed in range(2, 18)}, Feed(lambda _: None)
    with streaming(pool, feed) as running:
        feed.ask([wanted(seed, LIMIT if seed < 2 else limits[seed]) for seed in range(6)])
        for seed in range(2, 6):
            feed.wait_for(seed)
        kill_engine(folder, 1)
        feed.ask([wanted(seed, limits[seed]) for seed in range(6, 12)])
        wait_for_notes(pool, 1)
        assert engines_of(pool).living == [0]
        for seed in range(6, 12):
            feed.wait_for(seed)
        assert pool.generator.lacks_weights
        pool.refit(0)
        assert (engines_of(pool).living, pool.generator.lacks_weights) == ([0, 1], False)
        feed.ask([wanted(seed, limits[seed]) for seed in range(12, 18)])
        for seed in range(12, 18):
            feed.wait_for(seed)
        feed.end()
        running.result()
    assert (feed.found.keys(), feed.num_outstanding) == (set(range(18)), 0)
    told = r"the engine of rank 1 \(node .*\) failed: generator-1 died\. [1-7] samples are dealt to the others; .*"
    assert re.fullmatch(told, pool.progress.texts[0])
    assert (pool.generator.take_restarts(), pool.generator.take_restarts()) == (1, 0)
    found = {seed: (feed.found[seed].tokens.tolist(), feed.found[seed].text) for seed in limits}
    assert found == alone(pool.generator, limits)
    assert_nothing_runs(pool)


def test_an_engine_that_dies_in_a_refit_is_left_out_until_the_next(pool: Pool, folder: Path) -> None:
    kill_engine(folder, 1)
    pool.refit(0)
    assert engines_of(pool).living == [0]
    assert "generator-1 died. The others generate its share" in pool.progress.texts[0]
    feed = Feed(end_after(4))
    feed.begin(0)
    feed.ask([wanted(seed, 3) for seed in range(4)])
    pool.generator.stream(feed, 0)
    assert len(feed.found) == 4
    (folder / "starting-1").touch()
    pool.refit(0)
    assert engines_of(pool).living == [0], "the others do not wait"
    (folder / "starting-1").unlink()
    pool.refit(0)
    assert (engines_of(pool).living, pool.generator.take_restarts()) == ([0, 1], 1)
    assert len(pool.progress.texts) == 1
    assert_nothing_runs(pool)


def test_what_a_trainer_keeps_on_devices_is_that_of_the_rank_with_the_most(pool: Pool) -> None:
    assert pool.backends.trainer is not None
    left = pool.backends.trainer.set_residency(SetResidencyRequest(weights="device", state="device"))
    assert left.reserved_bytes == 1001
    assert left.device_bytes > 0


def test_an_engine_that_dies_as_it_goes_to_sleep_is_left_out_and_wakes_with_the_others(pool: Pool, folder: Path) -> None:
    asleep, stirring, awake = (
        SetResidencyRequest(weights=weights, state=state)
        for weights, state in (("host", "host"), ("device", "host"), ("device", "device"))
    )
    kill_engine(folder, 1)
    assert pool.generator.set_residency(asleep).device_bytes >= 0
    assert (engines_of(pool).living, pool.generator.is_usable) == ([0], True)
    kill_engine(folder, 1)
    pool.generator.set_residency(stirring)
    pool.refit(0)
    assert engines_of(pool).living == [0, 1]
    pool.generator.set_residency(awake)
    feed = Feed(end_after(6))
    feed.begin(0)
    feed.ask([wanted(seed, 3) for seed in range(6)])
    pool.generator.stream(feed, 0)
    assert (len(feed.found), pool.generator.take_restarts(), len(pool.progress.texts)) == (6, 1, 1)
    assert_nothing_runs(pool)


def test_with_the_last_engine_the_generation_fails_and_can_be_tried_again(pool: Pool, folder: Path) -> None:
    for rank in range(2):
        kill_engine(folder, rank)
    feed = Feed(end_after(4))
    feed.begin(0)
    feed.ask([wanted(seed, 3) for seed in range(4)])
    with pytest.raises(WorkerError, match=r"generator-[01] died"):
        pool.generator.stream(feed, 0)
    assert pool.generator.is_usable
    with pytest.raises(WorkerError, match="no engine holds weights"):
        pool.generator.stream(feed, 0)
    pool.refit(0)
    feed.requeue()
    feed.begin(0)
    pool.generator.stream(feed, 0)
    assert len(feed.found) == 4
    assert_nothing_runs(pool)


@pytest.mark.usefixtures("local_ray")
def test_a_rank_whose_engine_is_out_and_that_dies_itself_ends_the_stream(tmp_path: Path) -> None:
    """Within seconds, while the other has more to do than it ends."""
    feed, died = Feed(lambda _: None), pytest.raises(WorkerError, match=r"stream_standby: rank 1 \(node .*\) died")
    with died, opened(tmp_path, *engine_options(tmp_path)) as pool, streaming(pool, feed) as running:
        feed.ask([wanted(seed, LIMIT) for seed in range(4)])
        kill_engine(tmp_path, 1)
        wait_for_notes(pool, 1)
        assert engines_of(pool).living == [0]
        os.kill(pool.generator.calls.workers[1].pid, signal.SIGKILL)
        running.result(300)
    assert not pool.generator.is_usable


@pytest.mark.wide
@pytest.mark.usefixtures("local_ray")
def test_an_engine_that_fails_again_and_again_ends_the_run_with_the_cause(tmp_path: Path) -> None:
    options = ("cluster.max_engine_restarts=1", *engine_options(tmp_path))
    cause = pytest.raises(EngineLimitError, match="max_engine_restarts.*generator-1 died")
    with cause, opened(tmp_path, *options) as pool:
        feed = Feed(lambda _: None)
        with streaming(pool, feed) as running:
            for version in range(2):
                kill_engine(tmp_path, 1)
                feed.ask([wanted(seed, LIMIT) for seed in range(2)])
                if version == 0:
                    wait_for_notes(pool, 1)
                    pool.refit(0)
            running.result()
    assert not pool.generator.is_usable


@pytest.mark.usefixtures("local_ray")
def test_runs_are_those_that_nothing_disturbs(run: Run, tmp_path: Path) -> None:
    """At a staleness of 0 by their figures, and else by the schedule that a replay repeats."""
    options = (
        "cluster.gpus_per_node=2",
        "run.num_steps=3",
        "evaluation.every_n_steps=0",
        "evaluation.at_start=false",
        "evaluation.at_end=false",
        f"generator.ranked.folder={tmp_path}",
    )
    fault = "generator.ranked.fault={{kind='memory', rank=1, hook='stream', version={}}}"
    ahead = ("async.max_staleness=1", "algorithm.ranked.generation_ratio=true", "training.minibatches_per_step=1")
    runs, notes = tmp_path / "runs", Notes()
    run("run.name=whole", *options)
    run("run.name=failed", *options, fault.format(2), progress=notes)
    assert read_metrics(runs / "failed") == read_metrics(runs / "whole")
    assert len(notes.texts) == 1
    # It may fail before it is dealt its share.
    assert re.search(r"failed: out of memory on purpose\. (0|12) samples are dealt to the others", notes.texts[0])
    (tmp_path / "done-1").unlink()
    # A stream of later weights may not begin before the next come.
    run("run.name=ahead", *options, *ahead, fault.format(0), progress=notes)
    assert any("failed: out of memory on purpose. " in text for text in notes.texts[1:])
    schedule, notes = runs / "ahead" / "schedule.jsonl", Notes()
    run("run.name=replayed", *options, *ahead, replay_schedule=schedule, progress=notes)
    steps = [path.read_text().splitlines()[1:] for path in (schedule, runs / "replayed" / "schedule.jsonl")]
    assert steps[0] == steps[1]
    assert len(steps[0]) == 3
    assert not [text for text in notes.texts if "replay" in text], "it is the run of its file"
