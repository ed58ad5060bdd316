"""Benchmarks as their users start them, but in this process, which has imported what they all need."""

import io
import json
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
Script = Callable[..., str]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    """`python benchmarks/NAME.py ARGUMENTS`; returns what it prints. Scripts that it starts by subprocess.run, such as itself
    for a row, run in this process too."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    before = set(sys.modules)
    run_command = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        is_script = command[0] == sys.executable and Path(command[1]).parent == BENCHMARKS
        if not is_script:
            return run_command(command, **options)
        with monkeypatch.context() as patch:
            for variable, value in (options.get("env") or {}).items():
                patch.setenv(variable, value)
            return subprocess.CompletedProcess(command, 0, run_here(*command[1:]), "")

    def run_here(file: str, *arguments: str) -> str:
        with monkeypatch.context() as patch, redirect_stdout(io.StringIO()) as output:
            patch.setattr(sys, "argv", [file, *arguments])
            try:
                runpy.run_path(file, run_name="__main__")
            except SystemExit as end:
                if end.code:
                    raise
        return output.getvalue()

    monkeypatch.setattr(subprocess, "run", run)
    yield lambda name, *arguments: run_here(str(BENCHMARKS / name), *map(str, arguments))
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(BENCHMARKS)):
            del sys.modules[name]


@pytest.fixture
def rows_here(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that a script starts as processes of their own run in this one."""
    import generator_setup  # type: ignore[import-not-found]

    def run_process(command: list[str], log: Path, environment: dict[str, str], seconds: float) -> tuple[int, str]:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return 0, script(*command[1:])

    def finish(result: Any) -> None:
        print(json.dumps(result))
        sys.exit(0)

    monkeypatch.setattr(generator_setup, "run_process", run_process)
    monkeypatch.setattr(generator_setup, "finish", finish)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's only rank runs in this process."""

    def spawn(function: Callable[..., None], arguments: tuple[Any, ...], nprocs: int) -> None:
        assert nprocs == 1
        function(0, *arguments)

    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
