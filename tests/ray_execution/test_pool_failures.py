"""What goes wrong on one rank or on all: the worker's own error with its rank and last lines, and no hang."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.registry.plugin_errors import owner_of
from rlcore.run.plan.prepare import prepare
from rlcore.run.train import train
from rlcore.spi import BoundError, ContractError, NonFiniteError, StorageError, WorkerError
from rlcore.testing.fakes import FakeTokenizer
from rlcore_ray import calls
from rlcore_ray.pool_groups import PoolTrainer

from .conftest import Notes, ensure_ray, read_metrics, write_recipe  # type: ignore[import-not-found]
from .stream_support import LIMIT, Feed, opened, streaming, wanted  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("local_ray")

POOL = ("cluster.gpus_per_node=2", "evaluation.at_start=false")
KL = "algorithm.ranked.kl_coefficient=0.1"


@pytest.fixture(scope="module")
def baseline_run(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Metrics of a run in which nothing happens."""
    ensure_ray()
    folder = tmp_path_factory.mktemp("baseline_run")
    prepared = prepare(write_recipe(folder), [f"run.directory={folder}", *POOL, KL])
    train(prepared, resume=False, progress=Notes(), tokenizer=FakeTokenizer())
    return read_metrics(folder / "run")


def fault(kind: str, hook: str, rank: int = 1, version: int = 2, role: str = "trainer") -> list[str]:
    values = {"kind": f'"{kind}"', "hook": f'"{hook}"', "rank": rank, "version": version}
    return [f"{role}.ranked.fault.{name}={value}" for name, value in values.items()]


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "GRACE_S", 1.0)


def notes_of(error: BaseException) -> str:
    return "\n".join(error.__notes__)


def test_a_defect_on_one_rank_ends_the_others_and_is_named(run: Run, tmp_path: Path) -> None:
    """While the other rank waits in a collective."""
    with pytest.raises(ZeroDivisionError, match="a defect on purpose") as caught:
        run(*POOL, *fault("defect", "train_step"))
    notes = notes_of(caught.value)
    log = tmp_path / "runs" / "run" / "logs" / "rank-1.log"
    assert "raised on rank 1 (node 127.0.0.1, process " in notes
    assert f"Its output is in {log}.\nIts last lines:\n" in notes
    assert "this is rank 1" in notes
    assert "The worker's own traceback" in notes
    assert "go_wrong" in notes


def test_ranks_free_what_they_hold_where_the_drivers_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines have files of their own, which outlive them where their rank is only killed."""
    asked, ask = list[str](), calls.Calls.all

    def recorded(self: calls.Calls, name: str, *arguments: Any, **options: Any) -> Any:
        answers = ask(self, name, *arguments, **options)
        asked.append(name)
        return answers

    monkeypatch.setattr(calls.Calls, "all", recorded)
    with pytest.raises(StorageError, match="no room"), opened(tmp_path):
        raise StorageError("no room")
    assert asked[-1] == "close"


def test_an_observers_error_on_a_rank_is_its_own(run: Run) -> None:
    with pytest.raises(KeyError, match="a word") as caught:
        run(*POOL, 'observers.names=["failing"]', "observers.failing.word=a word")
    assert owner_of(caught.value) == "observer 'failing' (ranked-fakes 1.0)"
    assert "raised by observer 'failing' (ranked-fakes 1.0) before train_step of trainer 'ranked'" in notes_of(caught.value)


@pytest.mark.wide(keep=["not_finite"])
@pytest.mark.parametrize("kind", ["refuse", "not_finite", "bound"])
def test_what_all_ranks_raise_is_raised_as_it_is(run: Run, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their class, their message, their attributes."""
    monkeypatch.setattr(calls, "GRACE_S", 60.0)
    classes = {"refuse": ContractError, "not_finite": NonFiniteError, "bound": BoundError}
    with pytest.raises(classes[kind], match="on purpose") as caught:
        run(*POOL, *fault(kind, "train_step", rank=-1))
    assert type(caught.value) is classes[kind]
    notes = notes_of(caught.value)
    assert "raised on rank 0" in notes
    assert "raised on other ranks too: rank 1 (node 127.0.0.1, process" in notes
    if isinstance(caught.value, BoundError):
        assert caught.value.metrics == {"entropy": 3.5}
    if kind == "not_finite":
        assert "--resume continues from there" in notes, "nothing was changed, so it is saved"


@pytest.mark.wide  # test_pool_stream.py names a generator that hangs, with its line
def test_a_rank_that_is_late_is_named_with_the_line_where_it_is(run: Run) -> None:
    with pytest.raises(WorkerError) as caught:
        options = ("cluster.call_timeout_s=8", "cluster.max_restarts=0")
        run(*POOL, *options, *fault("hang", "train_step"))
    message = str(caught.value)
    assert message.startswith("train_step: no answer within 8 s from rank 0 ")
    assert "; rank 1 (node 127.0.0.1, process " in message
    assert "in train_step, at " in message
    assert "ranked_fakes.py" in message
    assert "cluster.call_timeout_s" in message


@pytest.mark.wide  # below one lags in a stream
def test_a_rank_that_lags_behind_the_first_is_named_alone(run: Run) -> None:
    """In a call in which none waits for another."""
    with pytest.raises(WorkerError) as caught:
        options = ("cluster.straggler_timeout_s=6", "cluster.max_restarts=0", "checkpoint.every_n_steps=1")
        run(*POOL, *options, *fault("hang", "save_state"))
    assert "no answer 6 s after the first rank's from rank 1 " in str(caught.value)
    assert "from rank 0" not in str(caught.value)


def test_ranks_that_disagree_end_the_run(run: Run) -> None:
    with pytest.raises(ContractError, match=r"train_step: rank 1 .* returned .*; expected rank 0's"):
        run(*POOL, *fault("differ", "train_step"))


def test_ranks_that_export_other_weights_end_the_run(run: Run) -> None:
    separate = ("cluster.gpus_per_node=3", 'cluster.placement="separate"', "cluster.generator_gpus_per_node=1")
    with pytest.raises(ContractError, match="export_weights: rank 1 .* rank 0, in 1 tensors"):
        run(*POOL, *separate, *fault("differ", "export_weights"))


def test_a_refit_that_fails_on_one_rank_is_tried_again_on_all(run: Run, tmp_path: Path, baseline_run: list[Any]) -> None:
    """The others are not left in the middle of the export."""
    folder = tmp_path / "marks"
    folder.mkdir()
    notes = Notes()
    options = (f"generator.ranked.folder={folder}",)
    run(*POOL, KL, *options, *fault("fail_refit", "refit", role="generator"), progress=notes)
    assert len(notes.texts) == 1
    assert "refit to version 2 failed and is tried again: a refit that fails on purpose" in notes.texts[0]
    assert read_metrics(tmp_path / "runs" / "run") == baseline_run


@pytest.mark.wide(keep=["train_step"])
@pytest.mark.parametrize("hook", ["train_step", "save_state", "stream", "get_logprobs", "export_weights"])
def test_a_rank_that_dies_costs_a_restart(run: Run, tmp_path: Path, baseline_run: list[Any], hook: str) -> None:
    folder = tmp_path / "marks"
    folder.mkdir()
    role = "generator" if hook == "stream" else "trainer"
    notes = Notes()
    run(*POOL, KL, f"{role}.ranked.folder={folder}", *fault("die", hook, version=4, role=role), progress=notes)
    assert [text for text in notes.texts if "restart 1 of 3, from the newest checkpoint" in text]
    assert any("rank 1 (node 127.0.0.1, process" in text and "died" in text for text in notes.texts)
    assert read_metrics(tmp_path / "runs" / "run") == baseline_run


def test_a_rank_that_lags_behind_the_others_in_a_stream_is_named(tmp_path: Path) -> None:
    """As one is in what all compute together: what a stream asks of its ranks is answered at once."""
    late = pytest.raises(WorkerError, match=r"stream_begin: .* 6 s after .* rank 1 \(node")
    feed = Feed(lambda _: None)
    with late as caught, opened(tmp_path, "cluster.straggler_timeout_s=6", "cluster.call_timeout_s=20") as pool:
        os.kill(pool.generator.calls.workers[1].pid, signal.SIGSTOP)
        with streaming(pool, feed) as running:
            running.result(300)
    assert "which does not answer at all. If it only needs longer, raise cluster.straggler_timeout_s" in str(caught.value)
    assert not pool.generator.is_usable


def test_a_rank_without_a_generator_that_dies_ends_the_stream(tmp_path: Path) -> None:
    """Within seconds, while no call waits for it, and the generator has more to do than it ends."""
    apart = ("cluster.gpus_per_node=3", "cluster.placement=separate", "cluster.generator_gpus_per_node=1")
    feed, died = Feed(lambda _: None), pytest.raises(WorkerError, match=r"stream_standby: rank 1 \(node .*\) died")
    with died, opened(tmp_path, *apart) as pool, streaming(pool, feed) as running:
        assert pool.generator.hosts == [0]
        feed.ask([wanted(seed, LIMIT) for seed in range(4)])
        os.kill(pool.generator.calls.workers[1].pid, signal.SIGKILL)
        running.result(300)
    assert not pool.generator.is_usable


def test_a_rank_of_the_reference_that_dies_ends_the_stream(tmp_path: Path) -> None:
    """Though its pool has no generator, and no call waits for it."""
    apart = ("cluster.gpus_per_node=4", "cluster.reference_gpus_per_node=2", KL)
    feed, died = Feed(lambda _: None), pytest.raises(WorkerError, match=r"stream_standby: reference rank 1 \(node .*\) died")
    with died as caught, opened(tmp_path, *apart) as pool, streaming(pool, feed) as running:
        assert isinstance(pool.backends.reference, PoolTrainer)
        reference = pool.backends.reference.calls
        feed.ask([wanted(seed, LIMIT) for seed in range(4)])
        os.kill(reference.workers[1].pid, signal.SIGKILL)
        running.result(300)
    assert not reference.is_usable
    assert f"Its output is in {tmp_path / 'run' / 'logs' / 'reference-rank-1.log'}" in str(caught.value)


def test_whoever_finds_a_rank_gone_that_another_found_first_says_as_much(tmp_path: Path) -> None:
    """With the rank's last lines, whichever of the two errors is the one that is seen."""
    apart = ("cluster.gpus_per_node=3", "cluster.placement=separate", "cluster.generator_gpus_per_node=1")
    feed = Feed(lambda _: None)
    with pytest.raises(WorkerError) as later, opened(tmp_path, *apart) as pool:
        with streaming(pool, feed) as running:
            feed.ask([wanted(seed, LIMIT) for seed in range(4)])
            os.kill(pool.generator.calls.workers[1].pid, signal.SIGKILL)
            with pytest.raises(WorkerError) as first:
                running.result(300)
        pool.train()
    told = str(first.value).removeprefix("stream_standby: ")
    assert re.match(r"rank 1 \(node .*\) died: ", told)
    assert re.search(r"Its last lines:\n  --- .*\n  this is rank 1$", told)
    assert str(later.value) == f"train_step: the workers are gone: {told}"


def test_ctrl_c_saves_a_checkpoint_and_resumes(run: Run, tmp_path: Path, baseline_run: list[Any]) -> None:
    from rlcore.spi import InterruptedRun

    class Presses(Notes):
        def step(self, step: int, metrics: Any) -> None:
            if step == 3:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(InterruptedRun, match="stopped after step 3"):
        run(*POOL, KL, "checkpoint.every_n_steps=0", progress=Presses())
    run(*POOL, KL, resume=True)
    assert read_metrics(tmp_path / "runs" / "run") == baseline_run
