"""Programs in another environment of Python, which may have other versions of packages or no rlcore."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import frozen

from rlcore.spi import ConfigError, Problem


@frozen(kw_only=True)
class Ran:
    """A program that has ended."""

    exit_code: int
    output: str
    """Standard output and standard error."""

    def last_lines(self, count: int) -> str:
        """The end of its output."""
        return "\n".join(self.output.strip().splitlines()[-count:])


def executable(python: Path | None) -> str:
    """The interpreter of an environment, given by its path or its folder's; None is this one. ConfigError without one."""
    if python is None:
        return sys.executable
    path = python / "bin" / "python" if python.is_dir() else python
    if not os.access(path, os.X_OK) or path.is_dir():
        found = f"{path}, {'which cannot be executed' if path.exists() else 'no such file'}"
        expected = "the interpreter of an environment, or the environment's folder"
        raise ConfigError([Problem(path="--python", found=found, expected=expected)])
    return str(path.absolute())  # not resolved: an environment's interpreter is a link


def run_python(
    python: str, arguments: Sequence[str], *, folder: Path | None = None, limit_s: float | None = None, **variables: str
) -> Ran:
    """Run a program by an interpreter, with further variables of its environment. ConfigError where it does not start, or does
    not end in time."""
    environment: Mapping[str, str] = {**os.environ, **variables}
    try:
        ran = subprocess.run(
            [python, *arguments], cwd=folder, env=environment, capture_output=True, timeout=limit_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError([Problem(path="--python", found=str(error), expected="an interpreter that runs")]) from error
    return Ran(exit_code=ran.returncode, output=(ran.stdout + ran.stderr).decode(errors="replace"))
