"""Workers that die and refits that fail: tried again with the same seeds, a bounded number of times, and never stale."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.run.evaluate import evaluate
from rlcore.run.execution import in_process
from rlcore.run.execution.in_process import open_backends
from rlcore.run.execution.refit import Refitter
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import PhaseClock
from rlcore.spi import CheckpointError, Delta, DraftCounts, RefitError, SampleFeed, WorkerError, hookimpl
from rlcore.spi.execution import EngineLimitError, RefitCommand, Refitted
from rlcore.testing.fakes import FakeTokenizer
from rlcore.testing.fakes.generator import FakeGenerator
from rlcore.testing.fakes.providers import FAKE_ALGORITHM, FAKE_ENVIRONMENT, FAKE_GENERATOR, FAKE_TRAINER

from ..conftest import read_metrics  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]


class Mortal(FakeGenerator):
    """Dies in calls number `dies_in`, counted per hook from 1, and comes back without weights."""

    dies_in: ClassVar[dict[str, set[int]]] = {}
    calls: ClassVar[dict[str, int]] = {}

    @classmethod
    def dies(cls, **hooks: set[int]) -> None:
        cls.dies_in, cls.calls = hooks, dict.fromkeys(hooks, 0)

    def survive(self, hook: str) -> None:
        if hook not in self.calls:
            return
        self.calls[hook] += 1
        if self.calls[hook] in self.dies_in[hook]:
            self.drop_weights()
            raise WorkerError(f"engine 0 died in {hook}\nits last lines")

    @hookimpl
    def stream(self, request):
        return super().stream(evolve(request, feed=Watched(request.feed, lambda: self.survive("stream"))))

    @hookimpl
    def refit(self, request):
        self.survive("refit")
        return super().refit(request)


class Watched:
    """A feed that calls `survive` once, as soon as it has been handed samples."""

    def __init__(self, feed: SampleFeed, survive: Callable[[], None]) -> None:
        self.feed, self.survive = feed, survive
        self.is_new = True
        self.end = feed.end

    def take(self, *, wait: bool) -> Any:
        return self.feed.take(wait=wait)

    def deliver(self, samples: Any, result: Any) -> None:
        self.feed.deliver(samples, result)
        if self.is_new:
            self.is_new = False
            self.survive()


class Notes(Progress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def mortal() -> Registry:
    provider = evolve(FAKE_GENERATOR, backend=f"{__name__}:Mortal")
    return Registry.from_providers(
        {
            "trainer": [FAKE_TRAINER],
            "generator": [provider],
            "algorithm": [FAKE_ALGORITHM],
            "environment": [FAKE_ENVIRONMENT],
        }
    )


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The provider names its class by import path."""
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules[Mortal.__module__])


def test_what_a_dead_worker_took_with_it_is_generated_again(run: Run, mortal: Registry, tmp_path: Path) -> None:
    """With the metrics of an undisturbed run."""
    Mortal.dies()
    run("run.name=baseline_run", registry=mortal)
    Mortal.dies(stream={2, 4, 7}, refit={3})
    notes = Notes()
    run("run.name=disturbed", registry=mortal, progress=notes)
    baseline_run, disturbed = (read_metrics(tmp_path / "runs" / name) for name in ("baseline_run", "disturbed"))
    assert disturbed == baseline_run
    assert len(notes.texts) == 4
    assert sum("generation failed and is tried again: engine 0 died in stream" in text for text in notes.texts) == 3
    assert sum("refit to version" in text and "its last lines" not in text for text in notes.texts) == 1


@pytest.mark.parametrize("hook", ["stream", "refit"])
def test_a_worker_that_keeps_dying_ends_the_run(run: Run, mortal: Registry, tmp_path: Path, hook: str) -> None:
    """After refit.max_attempts, with what was done before intact."""
    Mortal.dies(**{hook: set(range(4, 100))})
    with pytest.raises(WorkerError, match=f"died in {hook}"):
        run("refit.max_attempts=3", registry=mortal)
    assert Mortal.calls[hook] == 4 + 2
    Mortal.dies()
    summary = run("refit.max_attempts=3", registry=mortal, resume=True)
    assert summary["steps"] == 6


def test_one_attempt_is_one(run: Run, mortal: Registry) -> None:
    Mortal.dies(refit={1})
    with pytest.raises(WorkerError):
        run("refit.max_attempts=1", registry=mortal)
    assert Mortal.calls["refit"] == 1


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs with a [cluster] find their workers in this process. Those that are named here do not start."""
    doomed: list[str] = []

    @contextmanager
    def opened(*arguments: Any) -> Iterator[Any]:
        if doomed:
            raise WorkerError(f"build: {doomed.pop()} died")
        with open_backends(*arguments) as backends:
            yield backends

    monkeypatch.setattr(in_process, "open_backends", opened)
    return doomed


def test_an_evaluation_by_itself_is_tried_again_too(prepared: Any, mortal: Registry) -> None:
    figures = []
    for dead in (set(), {1}):
        Mortal.dies(stream=dead)
        options: dict[str, Any] = {"checkpoint": None, "progress": Progress(), "tokenizer": FakeTokenizer()}
        figures.append(evaluate(prepared(registry=mortal), **options))
    assert figures[0] == figures[1]


RESTARTS = ("cluster.max_restarts=3", "refit.max_attempts=1")


def test_what_a_run_says_of_its_recipe_and_its_data_it_says_once(run: Run, mortal: Registry, cluster: list[str]) -> None:
    """However often its workers are started anew."""
    Mortal.dies()
    run("run.num_steps=2", *RESTARTS, registry=mortal)
    cluster += ["rank 1", "rank 0"]
    Mortal.dies(stream={3})
    odd, notes = evolve(mortal, warnings=("a plugin is odd",)), Notes()
    run("run.num_steps=4", "optimizer.learning_rate=0.05", *RESTARTS, resume=True, registry=odd, progress=notes)
    assert notes.texts == [
        "the recipe has changed: run.num_steps 2 -> 4; optimizer.learning_rate 0.1 -> 0.05",
        "a plugin is odd",
        "restart 1 of 3, from the newest checkpoint: build: rank 0 died",
        "restart 2 of 3, from the newest checkpoint: build: rank 1 died",
        "restart 3 of 3, from the newest checkpoint: engine 0 died in stream",
    ]


def test_restarts_are_bounded(run: Run, mortal: Registry, cluster: list[str]) -> None:
    cluster += ["rank 1", "rank 0"]
    Mortal.dies()
    notes = Notes()
    with pytest.raises(WorkerError, match="rank 1 died") as caught:
        run("cluster.max_restarts=1", registry=mortal, progress=notes)
    restarts = [text for text in notes.texts if text.startswith("restart ")]
    assert restarts == ["restart 1 of 1, from the newest checkpoint: build: rank 0 died"]
    assert caught.value.__notes__ == ["The workers had been started anew 1 times (cluster.max_restarts)."]


def test_an_engine_that_fails_again_and_again_is_no_reason_to_start_workers_anew(
    run: Run, mortal: Registry, cluster: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Mortal.dies(stream={3})
    monkeypatch.setattr(f"{__name__}.WorkerError", EngineLimitError)
    notes = Notes()
    with pytest.raises(EngineLimitError, match="engine 0 died"):
        run(*RESTARTS, registry=mortal, progress=notes)
    assert notes.texts == []


def test_checkpoints_that_are_gone_when_workers_start_anew_are_said(run: Run, mortal: Registry, cluster: list[str]) -> None:
    Mortal.dies(stream={5})
    with pytest.raises(CheckpointError, match="no checkpoint; .* step 3"):
        run(*RESTARTS, registry=mortal, progress=RemovesCheckpoints())


class RemovesCheckpoints(Progress):
    """Once workers are to be started anew."""

    def started(self, run_directory: Path, start_step: int, num_steps: int) -> None:
        self.checkpoints = run_directory / "checkpoints"

    def note(self, text: str) -> None:
        if text.startswith("restart "):
            shutil.rmtree(self.checkpoints)


def test_the_seconds_of_a_run_are_those_of_all_its_workers(run: Run, mortal: Registry, cluster: list[str]) -> None:
    Mortal.dies(stream={5})
    summary = run(*RESTARTS, registry=mortal, progress=SlowSteps())
    assert summary["total_s"] - summary["setup_s"] > SlowSteps.SECONDS, "what came before the restart is no set-up"


class SlowSteps(Progress):
    """The first one alone."""

    SECONDS = 0.5

    def step(self, step: int, metrics: Any) -> None:
        time.sleep(self.SECONDS if step == 1 else 0.0)


def test_weights_that_change_on_the_way_twice_end_the_run(run: Run, mortal: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self, request):
        raise RefitError("refit: layer.0 changed on the way")

    monkeypatch.setattr(Mortal, "survive", lambda self, hook: refuse(self, None) if hook == "refit" else None)
    with pytest.raises(RefitError, match="changed on the way"):
        run(registry=mortal)


class Unsteady:
    """A route that fails in the calls of these numbers, counted from 1, and keeps what it was asked to send."""

    is_usable = True
    lacks_weights = False

    def __init__(self, *fails_in: int) -> None:
        self.fails_in = fails_in
        self.sent: list[str] = []
        self.orders: list[RefitCommand] = []

    def take_restarts(self) -> int:
        return 0

    def sync_weights(self, order: RefitCommand) -> Refitted:
        self.sent.append(order.export.adapters)
        self.orders.append(order)
        if len(self.sent) in self.fails_in:
            raise RefitError("another digest")
        return Refitted(sent_bytes=2**19)


class Guessing:
    """A route whose generator has guessed this much before each refit."""

    is_usable = True
    lacks_weights = False

    def __init__(self, *drafts: DraftCounts | None) -> None:
        self.drafts = iter(drafts)
        self.num_restarts = 0

    def take_restarts(self) -> int:
        count, self.num_restarts = self.num_restarts, 0
        return count

    def sync_weights(self, order: RefitCommand) -> Refitted:
        return Refitted(drafts=next(self.drafts))


def test_what_was_guessed_is_told_once() -> None:
    three = DraftCounts(num_drafts=2, num_draft_tokens=6, num_accepted_tokens=3)
    refitter = refitter_of(Guessing(None, DraftCounts(), three, three, three), unmerged=False)
    for version in range(2):
        refitter.refit(version)
        assert refitter.take_metrics() == {}
    for version in range(2, 4):
        refitter.refit(version)
    expected = {"draft_tokens": 12.0, "accepted_tokens": 6.0, "acceptance_rate": 0.5, "mean_acceptance_length": 2.5}
    assert refitter.take_metrics() == {f"speculative/{name}": value for name, value in expected.items()}
    refitter.refit(3)
    assert refitter.take_metrics() == {}
    refitter.refit(4)
    assert refitter.take_metrics()["speculative/draft_tokens"] == 6.0


@pytest.mark.parametrize(("channel", "by_trainer"), [("shards", "host"), ("directory", "off")])
def test_the_end_of_a_channel_that_sends_is_asked_for_changes(channel: str, by_trainer: str) -> None:
    pytest.importorskip("rlcore_torchkit", reason="has these channels")
    route: Any = Unsteady()
    refitter = refitter_of(route, unmerged=False, channel=channel, delta="host")
    refitter.refit(0)
    assert [(order.delta, order.export.delta) for order in route.orders] == [("host", by_trainer)]


def test_bytes_that_were_sent_are_told_once() -> None:
    refitter = refitter_of(Unsteady(2), unmerged=False)
    for version in range(2):
        refitter.refit(version)
    assert [refitter.take_metrics(), refitter.take_metrics()] == [{"refit/sent_mib": 1.0}, {}]


def test_engines_that_came_back_are_told_once() -> None:
    route = Guessing(None)
    refitter = refitter_of(route, unmerged=False)
    refitter.refit(0)
    assert refitter.take_metrics() == {}
    route.num_restarts = 2
    assert [refitter.take_metrics(), refitter.take_metrics()] == [{"generation/engine_restarts": 2.0}, {}]


def test_adapters_used_longest_ago_make_room() -> None:
    route: Any = Unsteady()
    refitter = refitter_of(route, unmerged=True)
    refitter.max_adapters = 2

    def bring(name: str, version: int) -> None:
        refitter.adapter = name
        refitter.refit(version)

    bring("", 0)
    bring("one", 0)
    refitter.use("")
    bring("two", 5)
    bring("", 0)  # which is held
    refitter.held = {**refitter.held, "two": -1}  # begun anew
    bring("two", 5)
    assert refitter.held == {"": 0, "two": 5}
    orders = [(order.export.adapters, order.adapter, order.drops) for order in route.orders]
    assert orders == [("apart", "", ()), ("alone", "one", ()), ("alone", "two", ("one",)), ("alone", "two", ())]
    refitter.held = {}
    bring("one", 1)
    assert refitter.held == {"one": 1}
    assert (route.orders[-1].export.adapters, route.orders[-1].drops) == ("apart", ())


def test_failed_refit_of_one_adapter_costs_the_others() -> None:
    route: Any = Unsteady(2)
    refitter = refitter_of(route, unmerged=True)
    refitter.max_adapters = 2
    refitter.refit(0)
    refitter.adapter = "one"
    refitter.refit(0)
    assert route.sent == ["apart", "alone", "apart"]
    assert refitter.held == {"one": 0}


def refitter_of(route: Any, *, unmerged: bool, channel: str = "in_process", delta: Delta = "off") -> Refitter:
    return Refitter(
        route=route,
        generator=route,
        channel=channel,
        dtype="float32",
        max_bucket_bytes=1,
        max_attempts=2,
        delta=delta,
        unmerged=unmerged,
        may_alias=False,
        clock=PhaseClock(Notes()),
        progress=Notes(),
    )


@pytest.mark.parametrize("unmerged", [False, True])
def test_adapters_travel_alone_only_to_a_generator_that_holds_the_weights(unmerged: bool) -> None:
    route: Any = Unsteady(3)
    refitter = refitter_of(route, unmerged=unmerged)
    for version in (0, 0, 1, 2):
        refitter.refit(version)
    refitter.held = {}  # as where it sleeps
    refitter.refit(2)
    route.lacks_weights = True  # one of its engines was started anew
    refitter.refit(3)
    assert route.sent == (["apart", "alone", "alone", "apart", "apart", "apart"] if unmerged else ["merged"] * 6)


AWAY = ("run.device=cuda", "model.dtype=float32", "offload.trainer=all")
"""The trainer's weights leave the device while the generator works."""


def test_what_dies_while_the_trainer_is_away_is_refitted_all_the_same(run: Run, mortal: Registry, tmp_path: Path) -> None:
    """Its weights come back for the refit, and leave again."""
    Mortal.dies()
    run("run.name=baseline_run", *AWAY, registry=mortal)
    Mortal.dies(stream={2, 4, 7}, refit={3})
    notes = Notes()
    run("run.name=disturbed", *AWAY, registry=mortal, progress=notes)
    baseline_run, disturbed = (read_metrics(tmp_path / "runs" / name) for name in ("baseline_run", "disturbed"))
    assert disturbed == baseline_run
    assert sum("is tried again" in text for text in notes.texts) == 4
    assert {record["memory/trainer_idle_gib"] for record in disturbed if "memory/trainer_idle_gib" in record} == {0.0}


def test_an_evaluation_alone_is_tried_again_while_the_trainer_is_away(
    run: Run, prepared: Callable[..., Any], mortal: Registry
) -> None:
    Mortal.dies(stream={1})
    notes = Notes()
    figures = evaluate(prepared(*AWAY, registry=mortal), checkpoint=None, progress=notes, tokenizer=FakeTokenizer())
    assert figures["eval/failed"] == 0.0
    assert [text for text in notes.texts if "generation failed and is tried again" in text]
