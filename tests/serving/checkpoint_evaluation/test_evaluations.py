"""Runs whose checkpoints a program measures: the figures, failures, the end of the run, retention and resumption."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from attrs import evolve

from rlcore.config.checkpoint_evaluation import CheckpointEvaluationConfig
from rlcore.config.model import ModelConfig
from rlcore.config.plugin_choice import NamedPluginChoice
from rlcore.config.recipe import CheckpointConfig, Recipe
from rlcore.registry.discovery import Registry
from rlcore.run.interrupt import InterruptGuard
from rlcore.run.report.progress import Progress
from rlcore.run.report.sinks import Sinks
from rlcore.run.report.timing import PhaseClock
from rlcore.run.storage.run_directory import RunDirectory
from rlcore.spi import InterruptedRun, SaveStateRequest, SaveStateResult, capabilities, hookimpl
from rlcore.testing.fakes.providers import FAKE_TRAINER
from rlcore.testing.fakes.trainer import FakeTrainer
from rlcore_serve.checkpoint_evaluation import evaluations
from rlcore_serve.checkpoint_evaluation.evaluations import CheckpointEvaluations, evaluated_run

from ...core.run import conftest  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]
OWN_SESSIONS = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")
STEP = 'echo "{\\"accuracy\\": {step}.5}"'


class ExportingTrainer(FakeTrainer):
    """Exports a config.json alone; its fifth step may fail."""

    fails = False
    is_full = False

    @hookimpl
    def save_state(self, request: SaveStateRequest) -> SaveStateResult:
        if request.kind == "resume":
            return super().save_state(request)
        if self.is_full:
            raise OSError(28, "No space left on device")
        (request.directory / "config.json").write_text(json.dumps({"version": self.weight_version}))
        return SaveStateResult(files=("config.json",))

    @hookimpl
    def train_step(self, request):
        if self.fails and request.weight_version == 8:
            raise ZeroDivisionError("the cause")
        return super().train_step(request)


@pytest.fixture(autouse=True)
def failures_count_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluations, "GRACE_S", 0.0)


@pytest.fixture
def exporting(registry_with: Callable[..., Registry], monkeypatch: pytest.MonkeyPatch) -> Registry:
    able = evolve(FAKE_TRAINER, capabilities=FAKE_TRAINER.capabilities | {capabilities.SAVE_HF})
    monkeypatch.setitem(conftest.FAKES, "trainer", able)
    return registry_with(trainer=ExportingTrainer)


class Notes(Progress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def measuring(script: str, *options: str) -> list[str]:
    return [f"checkpoint_evaluation.command=['sh', '-c', '''{script}''']", *(f"checkpoint_evaluation.{one}" for one in options)]


def figures(run_directory: Path) -> dict[int, dict[str, float]]:
    """What was measured, by step, from the lines as they are."""
    lines = [json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()]
    measured = [line for line in lines if any(name.startswith("checkpoint_eval/") for name in line)]
    assert len({line["step"] for line in measured}) == len(measured)
    return {
        line["step"]: {name: value for name, value in line.items() if name.startswith("checkpoint_eval/")} for line in measured
    }


DRIVER = """
import sys, time
from pathlib import Path
from rlcore.config.checkpoint_evaluation import CheckpointEvaluationConfig
from rlcore.config.model import ModelConfig
from rlcore.config.plugin_choice import NamedPluginChoice
from rlcore.config.recipe import CheckpointConfig, Recipe
from rlcore_serve.checkpoint_evaluation.evaluations import CheckpointEvaluations
from rlcore_serve.checkpoint_evaluation.evaluations import evaluated_run
from rlcore.run.interrupt import InterruptGuard
from rlcore.run.report.progress import Progress
from rlcore.run.report.sinks import Sinks
from rlcore.run.report.timing import PhaseClock
from rlcore.run.storage.run_directory import RunDirectory
measure = CheckpointEvaluationConfig(command=tuple(sys.argv[2:]))
recipe = Recipe(
    model=ModelConfig(path="m"),
    algorithm=NamedPluginChoice(name="a"),
    checkpoint=CheckpointConfig(every_n_steps=1),
    checkpoint_evaluation=measure,
)
directory, progress = RunDirectory(path=Path(sys.argv[1])), Progress()
run = evaluated_run(recipe, directory, Sinks(progress), progress, PhaseClock(progress), InterruptGuard())
evaluations = CheckpointEvaluations(run)
evaluations.on_checkpoint_saved(1, lambda directory: directory.mkdir(parents=True))
evaluations.on_last_step()
"""
"""A process with a program that measures beside it."""


def waited() -> Iterator[None]:
    """Moments of a minute."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        yield
        time.sleep(0.02)


def is_gone(process: int) -> bool:
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def gone(process: int) -> bool:
    return any(is_gone(process) for _ in waited())


def test_figures_of_each_checkpoint_stand_beside_those_of_its_step(run: Run, exporting: Registry, tmp_path: Path) -> None:
    notes = Notes()
    run(*measuring(f"test -f {{model}}/config.json && {STEP}"), registry=exporting, progress=notes)
    run("run.name=without")
    assert figures(tmp_path / "runs" / "run") == {step: {"checkpoint_eval/accuracy": step + 0.5} for step in (2, 4, 6)}
    merged = RunDirectory(path=tmp_path / "runs" / "run").read_metrics()
    for record in merged:
        record.pop("checkpoint_eval/accuracy", None)
    others = conftest.read_metrics(tmp_path / "runs" / "without")
    measured = conftest.MEASURED
    assert [{name: one for name, one in record.items() if not name.startswith(measured)} for record in merged] == others
    assert "evaluation of the checkpoint of step 4: checkpoint_eval/accuracy 4.5" in notes.texts
    left = {
        str(path.relative_to(tmp_path / "runs/run/evaluations/step-000006"))
        for path in (tmp_path / "runs/run/evaluations/step-000006").iterdir()
    }
    assert left == {"output", "stdout.log", "stderr.log", "result.json"}


def test_every_nth_checkpoint_and_the_last_are_measured(run: Run, exporting: Registry, tmp_path: Path) -> None:
    run(
        *measuring(STEP, "every_n_checkpoints=2", "wait=true"),
        "run.num_steps=5",
        "checkpoint.every_n_steps=1",
        registry=exporting,
    )
    assert list(figures(tmp_path / "runs" / "run")) == [2, 4, 5]


def test_checkpoints_of_a_run_that_generates_ahead_are_measured(run: Run, exporting: Registry, tmp_path: Path) -> None:
    options = "async.max_staleness=1", "training.minibatches_per_step=1", "algorithm.fake.generation_ratio=true"
    run(*measuring("cat {model}/config.json", "wait=true"), *options, registry=exporting)
    assert figures(tmp_path / "runs" / "run") == {step: {"checkpoint_eval/version": float(step)} for step in (2, 4, 6)}


def test_a_model_outlives_its_checkpoint(run: Run, exporting: Registry, tmp_path: Path) -> None:
    script = "while test -e {run_directory}/checkpoints/step-000002; do sleep 0.02; done; cat {model}/config.json"
    run(*measuring(script), "checkpoint.keep=1", registry=exporting)
    assert figures(tmp_path / "runs" / "run") == {step: {"checkpoint_eval/version": 2.0 * step} for step in (2, 4, 6)}


@pytest.mark.parametrize(
    ("script", "options", "cause"),
    [
        ("exit 3", (), "sh ended with exit code 3"),
        ("echo nothing", (), "it printed no line that is a JSON object; the last is 'nothing'"),
        (STEP, ('result_file="*.json"',), "it wrote no file *.json below "),
    ],
)
def test_a_program_that_fails_is_noted_and_ends_no_run(
    run: Run, exporting: Registry, tmp_path: Path, script: str, options: tuple[str, ...], cause: str
) -> None:
    notes = Notes()
    summary = run(*measuring(script, *options), "checkpoint.every_n_steps=0", registry=exporting, progress=notes)
    assert summary["steps"] == 6
    (note,) = [text for text in notes.texts if "failed" in text]
    assert note.startswith(f"evaluation of the checkpoint of step 6 failed: {cause}")
    assert str(tmp_path / "runs" / "run" / "evaluations" / "step-000006") in note
    assert figures(tmp_path / "runs" / "run") == {}


def test_a_program_that_hangs_is_killed_with_what_it_started(run: Run, exporting: Registry, tmp_path: Path) -> None:
    notes, script = Notes(), "sleep 1000 & echo $! > {output}/child; echo $$ > {output}/own; wait"
    run(*measuring(script, "timeout_s=4.0"), "checkpoint.every_n_steps=0", registry=exporting, progress=notes)
    assert any("took longer than checkpoint_evaluation.timeout_s = 4 and was killed" in text for text in notes.texts)
    output = tmp_path / "runs" / "run" / "evaluations" / "step-000006" / "output"
    assert all(gone(int(file.read_text())) for file in output.iterdir())


@pytest.mark.parametrize("session", ["", pytest.param("setsid", marks=OWN_SESSIONS)])
def test_a_program_does_not_outlive_a_run_that_is_killed(tmp_path: Path, session: str) -> None:
    own = f"echo \\$\\$ > {tmp_path}/partial; mv {tmp_path}/partial {tmp_path}/child; exec sleep 1000"
    command = ("sh", "-c", f'{session} sh -c "{own}" & wait; sleep 1000')
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path), *command])
    try:
        assert any((tmp_path / "child").is_file() for _ in waited())
    finally:
        driver.kill()
        driver.wait()
    assert gone(int((tmp_path / "child").read_text()))


@pytest.fixture
def evaluations_of(tmp_path: Path) -> Iterator[Callable[[str], CheckpointEvaluations]]:
    """Evaluations of step 1 by a script, in the folder of the test."""
    made = []

    def make(script: str, progress: Progress | None = None) -> CheckpointEvaluations:
        options = CheckpointEvaluationConfig(command=("sh", "-c", script))
        recipe = Recipe(
            model=ModelConfig(path="m"),
            algorithm=NamedPluginChoice(name="a"),
            checkpoint=CheckpointConfig(every_n_steps=1),
            checkpoint_evaluation=options,
        )
        directory, progress = RunDirectory(path=tmp_path), progress or Progress()
        clock, guard = PhaseClock(progress), InterruptGuard()
        made.append(CheckpointEvaluations(evaluated_run(recipe, directory, Sinks(progress), progress, clock, guard)))
        return made[-1]

    yield make
    for one in made:
        one.on_close()


def make_model(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory


@OWN_SESSIONS
def test_what_a_program_leaves_behind_ends_with_it(evaluations_of: Any, tmp_path: Path) -> None:
    daemon = f"setsid sh -c 'echo $$ > {tmp_path}/partial; mv {tmp_path}/partial {tmp_path}/child; exec sleep 60' &"
    one = evaluations_of(f"{daemon} until test -e {tmp_path}/child; do sleep 0.02; done; {STEP}")
    one.on_checkpoint_saved(1, make_model)
    one.on_last_step()
    assert figures(tmp_path) == {1: {"checkpoint_eval/accuracy": 1.5}}
    assert is_gone(int((tmp_path / "child").read_text()))


def test_a_program_is_not_started_twice_where_its_process_is_killed(evaluations_of: Any, tmp_path: Path) -> None:
    notes = Notes()
    one = evaluations_of(f"echo x >> {tmp_path}/begun; echo $$ > {tmp_path}/own; kill -KILL $PPID; sleep 1000", notes)
    one.on_checkpoint_saved(1, make_model)
    one.on_last_step()
    assert "failed: its process ended with signal SIGKILL" in notes.texts[0]
    assert (tmp_path / "begun").read_text() == "x\n"
    assert gone(int((tmp_path / "own").read_text()))


class Watched(threading.Event):
    """Says whether one is waited for."""

    is_awaited = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.is_awaited.set()
        return super().wait(timeout)


def test_a_signal_to_the_whole_job_leaves_what_is_under_way_to_the_resumed_run(
    evaluations_of: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It reaches the program first, which has its own way to end."""
    monkeypatch.setattr(evaluations, "GRACE_S", 600.0)
    monkeypatch.setattr(evaluations, "threading", SimpleNamespace(Event=Watched))
    result = tmp_path / "evaluations" / "step-000001" / "result.json"
    script = (
        f"test -e {tmp_path}/go && {STEP} && exit; trap 'exit 1' TERM; touch {tmp_path}/begun; while :; do sleep 0.02; done"
    )
    one = evaluations_of(script)
    one.on_checkpoint_saved(1, make_model)
    assert any((tmp_path / "begun").is_file() for _ in waited())
    (process,) = [child for child in psutil.Process().children() if child.cmdline()[-1:] == [evaluations.TASK.name]]
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            each.terminate()
    assert any(Watched.is_awaited.is_set() or result.exists() for _ in waited())
    one.on_close()
    assert not result.exists()
    (tmp_path / "go").touch()
    resumed = evaluations_of(script)
    resumed.on_start(1)
    resumed.on_last_step()
    assert figures(tmp_path) == {1: {"checkpoint_eval/accuracy": 1.5}}


def test_a_program_that_is_stopped_alone_is_left_to_the_resumed_run(evaluations_of: Any, tmp_path: Path) -> None:
    notes = Notes()
    one = evaluations_of(f"test -e {tmp_path}/go && {STEP} && exit; kill -TERM $$", notes)
    one.on_checkpoint_saved(1, make_model)
    one.on_last_step()
    (note,) = notes.texts
    assert "step 1 was stopped: sh ended with signal SIGTERM. It is done again once the run is resumed" in note
    (tmp_path / "go").touch()
    one.on_start(1)
    one.on_last_step()
    assert figures(tmp_path) == {1: {"checkpoint_eval/accuracy": 1.5}}


def test_ctrl_c_does_not_wait_for_a_program_and_a_resumed_run_measures_again(
    run: Run, exporting: Registry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = f"echo $$ > {{output}}/own; kill -INT {os.getpid()}; sleep 1000"
    with pytest.raises(InterruptedRun, match="step 6"):
        run(*measuring(script), "checkpoint.every_n_steps=0", registry=exporting)
    folder = tmp_path / "runs" / "run"
    assert gone(int((folder / "evaluations" / "step-000006" / "output" / "own").read_text()))
    script = f'test "$COLOUR$PYTHONHASHSEED$WANDB_API_KEY$NAMED_KEY" = greennamed && {STEP}'
    monkeypatch.setenv("WANDB_API_KEY", "none of the program's")
    monkeypatch.setenv("NAMED_KEY", "named")
    options = (
        "checkpoint_evaluation.environment.COLOUR=green",
        "checkpoint_evaluation.environment.PYTHONHASHSEED=''",
        "checkpoint_evaluation.pass_environment=['NAMED_KEY']",
    )
    run(*measuring(script), *options, "checkpoint.every_n_steps=0", registry=exporting, resume=True)
    assert figures(folder) == {6: {"checkpoint_eval/accuracy": 6.5}}


def test_a_run_without_room_for_the_model_goes_on(
    run: Run, exporting: Registry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ExportingTrainer, "is_full", True)
    notes = Notes()
    run(*measuring(STEP), "checkpoint.every_n_steps=0", registry=exporting, progress=notes)
    assert any("step 6 is not evaluated: " in text and "No space left on device" in text for text in notes.texts)
    assert figures(tmp_path / "runs" / "run") == {}


def test_checkpoints_beyond_those_that_may_wait_are_not_measured_but_the_last_is(
    run: Run, exporting: Registry, tmp_path: Path
) -> None:
    notes = Notes()
    script = f"until test -e {{run_directory}}/evaluations/step-000008/model; do sleep 0.02; done; {STEP}"
    options = "max_waiting=1", "timeout_s=60"
    run(*measuring(script, *options), "run.num_steps=8", registry=exporting, progress=notes)
    assert list(figures(tmp_path / "runs" / "run")) == [2, 4, 8]
    assert [text[:48] for text in notes.texts if "not evaluated" in text] == [
        "the checkpoint of step 6 is not evaluated: 1 oth"
    ]


def test_what_a_run_left_under_way_is_measured_once_it_is_resumed(
    run: Run, exporting: Registry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "run"
    script = f"echo {{step}} >> {{run_directory}}/begun; until test -e {tmp_path}/go; do sleep 0.02; done; {STEP}"
    monkeypatch.setattr(ExportingTrainer, "fails", True)
    with pytest.raises(ZeroDivisionError, match="the cause"):
        run(*measuring(f"test {{step}} = 2 || exit 1; {STEP}", "every_n_checkpoints=1", "wait=true"), registry=exporting)
    assert list(figures(folder)) == [2]
    monkeypatch.setattr(ExportingTrainer, "fails", False)
    (tmp_path / "go").touch()
    run(*measuring(script), registry=exporting, resume=True)
    assert list(figures(folder)) == [2, 6]
    assert (folder / "begun").read_text().split() == ["6"]  # the failure at step 4 was told: it is not tried again


def test_an_evaluation_that_was_killed_with_its_run_is_done_again(
    run: Run, exporting: Registry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "run"
    script = f"until test -e {tmp_path}/go; do sleep 0.02; done; echo {{step}} >> {{run_directory}}/ended; {STEP}"
    monkeypatch.setattr(ExportingTrainer, "fails", True)
    with pytest.raises(ZeroDivisionError, match="the cause"):
        run(*measuring(script), registry=exporting)
    assert figures(folder) == {}
    assert (folder / "evaluations" / "step-000002" / "model" / "config.json").is_file()
    monkeypatch.setattr(ExportingTrainer, "fails", False)
    (tmp_path / "go").touch()
    run(*measuring(script), registry=exporting, resume=True)
    assert figures(folder) == {step: {"checkpoint_eval/accuracy": step + 0.5} for step in (2, 4, 6)}
    assert (folder / "ended").read_text().split() == ["2", "4", "6"]


def test_a_result_that_was_not_told_before_a_kill_is_told_and_later_ones_are_forgotten(
    run: Run, exporting: Registry, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "run"
    run("run.num_steps=2", registry=exporting)
    for step in (2, 4):
        left = folder / "evaluations" / f"step-{step:06d}"
        (left / "model").mkdir(parents=True)
        result = {"step": step, "figures": {"checkpoint_eval/accuracy": 7.0}, "failure": None, "seconds": 1.0}
        (left / "result.json").write_text(json.dumps(result))
    run(*measuring(STEP), "run.num_steps=4", registry=exporting, resume=True)
    assert figures(folder) == {2: {"checkpoint_eval/accuracy": 7.0}, 4: {"checkpoint_eval/accuracy": 4.5}}
