"""Environments of packages that the development environment does not have, made on demand and kept between runs."""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rlcore_model_files.file_lock import file_lock

UNREACHABLE = re.compile(
    r"NewConnectionError|NameResolutionError|Temporary failure in name|ConnectTimeout|Network is unreachable"
)
"""The words of pip where no registry answers."""
INSTALL_S = 900.0


def interpreter_with(requirement: str) -> Path:
    """Return the interpreter of an environment with one package. Skips the test where the registry cannot be reached."""
    name = hashlib.sha256(f"{sys.version}{requirement}".encode()).hexdigest()[:16]
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlcore-tests"
    folder = base / f"{re.split(r'[^a-z-]', requirement)[0]}-{name}"
    python, is_whole = folder / "bin" / "python", folder / "whole"
    base.mkdir(parents=True, exist_ok=True)
    with file_lock(base / f".{folder.name}.lock"):
        if not is_whole.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, timeout=INSTALL_S)
            command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement]
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
            if done.returncode and UNREACHABLE.search(done.stderr):
                pytest.skip(f"no registry to install {requirement} from")
            assert done.returncode == 0, done.stderr
            is_whole.touch()
    return python


def run_program(python: Path, source: str, **variables: str) -> str:
    """Run a program in an environment, with these variables, and return what it prints."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    quiet = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"  # smolagents reads the source of its tools
        program.write_text(source)
        done = subprocess.run(
            [python, program],
            env=kept | quiet | variables,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
