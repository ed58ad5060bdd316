"""The processes of a run started apart: known by a mark in their environment, and by what they are to it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import psutil

from rlcore_ray import orphan_processes

Role = Literal["driver", "rank", "engine", "raylet", "gcs", "other"]
"""`other` is what Ray starts beside the raylet and its store of addresses, and processes of environments."""
RLCORE = "from rlcore.cli.main import main; main()"
MARK = "RLCORE_KILLED_RUN"
"""An environment variable of all processes of a run."""
GONE_S = 120.0
"""Most seconds until all processes of a driver that was killed have ended. A node's agent of Ray may wait one of them for the
cluster's head to answer, which is dead by then."""


@contextmanager
def started(
    folder: Path, arguments: Sequence[str], mark: str, variables: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """`rlcore train` in a process of its own. `folder`/output has all that it says, in whatever state its disk is."""
    command = [sys.executable, "-c", RLCORE, "train", *arguments]
    environment = {**os.environ, **(variables or {}), MARK: mark}
    with (folder / "output").open("ab") as output, subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=output) as writer:
        assert writer.stdin is not None
        process = subprocess.Popen(command, cwd=folder, stdout=writer.stdin, stderr=writer.stdin, env=environment)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def last_step(run: Path) -> int:
    """By the whole lines of metrics.jsonl, which a resumed run sets back; -1 where it has none."""
    file = run / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else -1


def marked(mark: str) -> list[psutil.Process]:
    """All that live, by process id."""
    return sorted(orphan_processes.marked(MARK, mark), key=lambda process: process.pid)


def role(process: psutil.Process, driver: int) -> Role:
    """What it is to the run."""
    if process.pid == driver:
        return "driver"
    command: list[str] = []
    with suppress(psutil.Error):
        command = process.cmdline()
    if "rlcore_vllm" in " ".join(command):
        return "engine"
    names: dict[str, Role] = {"raylet": "raylet", "gcs_server": "gcs"}
    if command and command[0].startswith("ray::Worker"):
        return "rank"
    return names.get(Path(command[0]).name, "other") if command else "other"


def await_end_of_all(mark: str) -> None:
    """Nothing outlives a driver."""
    end = time.monotonic() + GONE_S
    while left := marked(mark):
        assert time.monotonic() < end, f"still there: {', '.join(map(orphan_processes.described, left))}"
        time.sleep(0.1)
