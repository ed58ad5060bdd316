"""An execution as the trainer sees it, where nothing but limits holds the program."""

import shutil
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from attrs import evolve

from rlcore.spi import PluginError
from rlcore_code import sandbox
from rlcore_code.checks import check_code
from rlcore_code.sandbox import Refused

from .sandboxes import CONFIG, run

PYTHON = Path(shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable)
"""One that the user 65534 can read, where the tests are root's."""
LIMITS = {"isolation": "limits", "python": PYTHON}


@pytest.fixture
def _limits():
    problems = [found for found in check_code(None, evolve(CONFIG, **LIMITS)) if hasattr(found, "found")]
    if problems:
        pytest.skip(str(problems[0]))


@pytest.mark.usefixtures("_limits")
def test_limits_hold_without_namespaces():
    program = """
        import os, resource
        print(input(), sorted(os.listdir(".")))
        try:
            x = bytearray(2**28)
        except MemoryError:
            print("no memory")
        try:
            open("big", "wb").write(bytes(2**22))
        except OSError as error:
            print(error.strerror)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    """
    execution = run(program, stdin="7\n", **LIMITS)
    assert execution.output == b"7 ['main.py', 'stdin']\nno memory\nFile too large\n"
    assert execution.exit_code == 0


@pytest.mark.usefixtures("_limits")
def test_limits_leave_no_files(monkeypatch):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)  # the user 65534 passes through it
        monkeypatch.setattr(sandbox.tempfile, "tempdir", folder)
        execution = run("import time\nopen('own', 'w').write('x')\ntime.sleep(600)", wall_time_s=1.0, **LIMITS)
        assert execution.timed_out
        assert list(Path(folder).iterdir()) == []


def test_a_program_that_cannot_be_started_is_refused(tmp_path):
    with pytest.raises(Refused, match=r"no-python(?s:.*)environment\.code\.isolation"):
        run("print(1)", isolation="limits", python=tmp_path / "no-python")


def test_a_launcher_that_fails_says_why(tmp_path, monkeypatch):
    broken = tmp_path / "launcher.py"
    broken.write_text(textwrap.dedent("import sys\nsys.exit('no such module')"))
    monkeypatch.setattr(sandbox, "LAUNCHER", broken)
    with pytest.raises(PluginError, match=r"launcher\.py.*no such module"):
        run("print(1)")
