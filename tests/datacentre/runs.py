"""Runs of rlcore on hosts: their commands, and their metrics beside those of one process."""

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import psutil
from attrs import frozen

from ..system.run_processes import last_step
from ..system.system_support import close, read_metrics
from .hosts import DataCentre, Host

SMALL = (
    "run.num_steps=2",
    "training.prompts_per_step=8",
    "rollout.samples_per_prompt=8",
    "checkpoint.every_n_steps=1",
    "trainer.name=fsdp2",
    "generator.name=transformers",
)
"""A run of seconds."""
TWO_HOSTS = ("cluster.nodes=2", "cluster.gpus_per_node=1", "cluster.address=auto", "cluster.wait_s=20")
CLEAN_S = 180.0
"""Most seconds until a host that lost its cluster has ended what a run left there: Ray waits a minute for its head."""
PROGRESS_S = 300.0
"""Most seconds for a step of a run, and for its end."""


@frozen(kw_only=True)
class Run:
    """A run under way on a host."""

    process: subprocess.Popen[bytes]
    directory: Path
    output: Path

    def said(self) -> str:
        """Return its output so far."""
        return self.output.read_text(errors="replace")

    def await_step(self, step: int) -> None:
        """Wait until so many steps are done."""
        deadline = time.monotonic() + PROGRESS_S
        while last_step(self.directory) < step:
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, f"no step {step}: {self.said()}"
            time.sleep(0.05)

    def end(self) -> int:
        """Wait for its end, and return the exit code."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(PROGRESS_S)
        raise AssertionError(f"the run does not end: {self.said()[-5000:]}")


@contextmanager
def started(host: Host, name: str, *arguments: str, recipe: str = "grpo.toml", **variables: str) -> Iterator[Run]:
    """Start `rlcore train` on a host; it is gone when the block ends."""
    output = host.shared / f"{name}-{uuid4().hex[:8]}.output"
    with output.open("ab") as file:
        process = host.popen(["rlcore", "train", recipe, f"run.name={name}", *arguments], file, **variables)
    try:
        yield Run(process=process, directory=host.shared / "runs" / name, output=output)
    finally:
        process.kill()
        process.wait()


def trained(host: Host, name: str, *arguments: str, recipe: str = "grpo.toml", **variables: str) -> Path:
    """Train to the end, which has to succeed; returns the run directory."""
    with started(host, name, *arguments, recipe=recipe, **variables) as run:
        code = run.end()
        assert code == 0, f"{code}: {run.said()}"
    return run.directory


def assert_same_metrics(run: Path, expected: Path) -> None:
    """The metrics of a run are those of another, to rounding in float32, and it has learnt."""
    found = read_metrics(run)
    assert sum(record["updates"] for record in found[1:]) > 0
    assert found == [{name: close(value) for name, value in record.items()} for record in read_metrics(expected)]


def assert_nothing_is_left(centre: DataCentre) -> None:
    """Every process of a run has ended, on all hosts, within the time that Ray takes to notice."""
    deadline = time.monotonic() + CLEAN_S
    while left := [f"{host.name}: {name}" for host in centre.hosts.values() for name in _of_runs(host)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.5)


def _of_runs(host: Host) -> list[str]:
    found = []
    for process in host.processes():
        with suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if command.startswith("ray::Worker") or "rlcore" in command:
                found.append(command)
    return found


def failure(host: Host, name: str, exit_code: int, *arguments: str, **variables: str) -> str:
    """The one error of a run that has to fail with this exit code."""
    with started(host, name, *arguments, **variables) as run:
        code = run.end()
    said = run.said()
    assert code == exit_code, f"{code}: {said}"
    assert len(re.findall("^error: ", said, re.MULTILINE)) == 1, said
    assert "Traceback" not in said
    return said
