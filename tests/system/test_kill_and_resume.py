"""Runs in a process of their own that are killed or stopped, and go on exactly as if they had not been."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlcore.run.plan.prepare import prepare
from rlcore.run.report.progress import Progress
from rlcore.run.train import train
from rlcore.spi import InterruptedRun

from .system_support import Workplace, checkpoints, read_metrics  # type: ignore[import-not-found]

EVERYTHING = (
    "algorithm.grpo.kl_coefficient=0.1",
    "algorithm.grpo.previous_logprobs=trainer",
    "algorithm.grpo.entropy_coefficient=0.01",
    "training.minibatches_per_step=3",
    "schedule.warmup_steps=5",
    'schedule.decay="cosine"',
    "trainer.fsdp2.activation_checkpointing=true",
    "rollout.top_k=8",
    "rollout.accept_truncation_bias=true",
)
"""Reference policy, several updates a step, a schedule, recomputed activations."""
COMMON = ("run.num_steps=5000", "evaluation.every_n_steps=7", "logging.rollouts_every_n_steps=0")
"""More steps than any of these runs gets to: each is ended from outside, however fast the machine is."""


RLCORE = "from rlcore.cli.main import main; main()"
KILLED_WHILE_SAVING = f"""
import os, signal, sys

opened = []

def see(event, arguments):
    if event == "open" and "/.step-000006.partial/" in str(arguments[0]):
        opened.append(arguments[0])
        if len(opened) > 2:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(see)
{RLCORE}
"""
"""Ends as soon as the checkpoint of step 6 has two files and opens a third."""


@contextmanager
def started(workplace: Workplace, *arguments: str, code: str = RLCORE) -> Iterator[subprocess.Popen[str]]:
    """`rlcore train` in a process of its own."""
    command = [sys.executable, "-c", code, "train", *arguments]
    process = subprocess.Popen(command, cwd=workplace.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


class StopsAfter(Progress):
    """Presses Ctrl-C once a step is logged."""

    def __init__(self, step: int) -> None:
        self.last = step

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.last:
            os.kill(os.getpid(), signal.SIGINT)


def run_until(step: int, *arguments: str, resume: bool = False) -> None:
    """Train in this process up to a step."""
    recipe, *overrides = arguments
    with pytest.raises(InterruptedRun, match=f"stopped after step {step};"):
        train(prepare(Path(recipe), overrides), resume=resume, progress=StopsAfter(step))


def wait_until(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    """Look again and again; the process has to be running all the while."""
    end = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


def num_lines(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.mark.wide(keep=["everything"])
@pytest.mark.parametrize("options", [(), EVERYTHING], ids=["plain", "everything"])
def test_killed_in_a_step_or_while_saving_it_resumes_exactly(workplace: Workplace, options: tuple[str, ...]) -> None:
    arguments = ("grpo.toml", *COMMON, *options, "checkpoint.every_n_steps=3")
    run, whole = workplace.run("killed"), workplace.run("whole")
    with started(workplace, *arguments, "run.name=killed", code=RLCORE if options else KILLED_WHILE_SAVING) as process:
        if options:
            wait_until(process, lambda: num_lines(run) > 8)
            process.kill()
        process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL
    if not options:
        (partial,) = (run / "checkpoints").glob(".step-*.partial")
        assert any(file.is_file() for file in partial.rglob("*"))
    last = num_lines(run) + 4
    run_until(last, *arguments, "run.name=killed", resume=True)
    run_until(last, *arguments, "run.name=whole")
    assert read_metrics(run) == read_metrics(whole)
    assert checkpoints(run) == checkpoints(whole), "nothing half-written is left"


@pytest.mark.wide  # tests/system/test_python.py interrupts a run, tests/core/cli the command
def test_stopped_by_ctrl_c_it_saves_and_says_how_to_go_on(workplace: Workplace) -> None:
    arguments = ("grpo.toml", *COMMON, "checkpoint.every_n_steps=0")
    run, whole = workplace.run("stopped"), workplace.run("whole")
    with started(workplace, *arguments, "run.name=stopped") as process:
        wait_until(process, lambda: num_lines(run) > 3)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    done = num_lines(run) - 1
    # Only the last line: optional libraries that do not find what they were built for say so when they are imported.
    assert errors.splitlines()[-1] == (
        f"error: stopped after step {done}; its checkpoint is in runs/stopped/checkpoints. "
        "Continue with the same command and --resume."
    )
    assert "Traceback" not in errors + output
    assert checkpoints(run) == [f"step-{done:06d}"]
    run_until(done + 4, *arguments, "run.name=stopped", resume=True)
    run_until(done + 4, *arguments, "run.name=whole")
    assert read_metrics(run) == read_metrics(whole)


def test_demonstrations_resume_exactly_with_several_epochs_and_updates(workplace: Workplace) -> None:
    options = (
        "run.num_steps=9",
        "training.minibatches_per_step=2",
        "training.prompts_per_step=16",
        "checkpoint.every_n_steps=4",
    )
    whole = workplace.train("sft.toml", *options, "run.name=whole")
    part = workplace.train("sft.toml", *options, "run.name=part", "run.num_steps=4")
    assert read_metrics(part) == read_metrics(whole)[:4]
    workplace.train("sft.toml", *options, "run.name=part", "--resume")
    assert read_metrics(part) == read_metrics(whole)
