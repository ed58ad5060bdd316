"""Sandboxes and programs for the tests of this folder, run by root and by a user without rights."""

import asyncio
import os
import shutil
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Literal

import psutil
import pytest
from attrs import evolve

from rlcore.spi import Problem
from rlcore_code import sandbox
from rlcore_code.checks import check_code
from rlcore_code.config import CodeConfig
from rlcore_code.sandbox import Execution, Sandbox

CONFIG = CodeConfig(cpu_time_s=2, wall_time_s=60.0, max_memory_mib=128, max_disk_mib=2, max_output_kib=64)
PYTHON = Path(shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable)
"""An interpreter that every user can read."""
ORDINARY = 54321
"""A user that has no other process, where the tests are root's."""
BECOME = f"""
import os, sys
os.setgroups([])
os.setresgid(*[{ORDINARY}] * 3)
os.setresuid(*[{ORDINARY}] * 3)
os.execv(sys.argv[1], sys.argv[1:])
"""
User = Literal["root", "ordinary user"]
Isolation = Literal["namespaces", "limits"]
EVERY = [(isolation, user) for isolation in ("namespaces", "limits") for user in ("root", "ordinary user")]

refused: dict[tuple[str, str], str] = {}
"""The reason why this machine refuses each isolation and user, once checked; empty where it does not."""


class Isolated:
    """Runs programs in one isolation, as one user."""

    def __init__(self, isolation: Isolation, user: User, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.isolation = isolation
        self.options = {"isolation": isolation}
        if user == "ordinary user" and os.geteuid() == 0:
            launcher = folder / "launcher.py"
            shutil.copy(sandbox.LAUNCHER, launcher)
            monkeypatch.setattr(sandbox, "LAUNCHER", launcher)
            monkeypatch.setattr(sandbox, "INTERPRETER", (str(PYTHON), "-c", BECOME, str(PYTHON), "-I", "-S"))
            make = tempfile.mkdtemp

            def own_folder(**options: str) -> str:
                made = make(**options)
                os.chown(made, ORDINARY, ORDINARY)
                return made

            monkeypatch.setattr(sandbox.tempfile, "mkdtemp", own_folder)
            self.options["python"] = PYTHON
        elif user == "root" and os.geteuid() != 0:
            pytest.skip("only root runs programs as root")
        elif isolation == "limits" and user == "root":
            self.options["python"] = PYTHON  # which other users can read
        if (isolation, user) not in refused:
            found = check_code(None, evolve(CONFIG, **self.options))
            refused[isolation, user] = next((str(one) for one in found if isinstance(one, Problem)), "")
        if refused[isolation, user]:
            pytest.skip(f"{isolation} of the {user}: {refused[isolation, user]}")

    def run(self, program: str, **options: object) -> Execution:
        """Run a program in this isolation and return its execution."""
        return run(program, **{**self.options, **options})


def run(program, *, wall_time_s=60.0, stdin="", **options):
    """Run a program without tests and return its execution."""
    running = Sandbox(evolve(CONFIG, **options)).run(
        {"main.py": textwrap.dedent(program)}, wall_time_s=wall_time_s, stdin=stdin
    )
    return asyncio.run(running)


def needs_namespaces():
    """Skip where the kernel refuses them, as in many containers."""
    if problems := check_code(None, CONFIG):
        pytest.skip(str(problems[0]))


def named(word):
    """Processes of this machine with a word in their command line."""
    found = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in found if word in line]
