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
    assert execution.output == b"7 ['main.py']\nno memory\nFile too large\n"
    assert execution.exit_code == 0


@pytest.mark.usefixtures("_limits")
def test_limits_leave_no_files(monkeypatch):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)  # the user 65534 passes through it
        monkeypatch.setattr(sandbox.tempfile, "tempdir", folder)
        execution = run("import time\nopen('own', 'w').write('x')\ntime.sleep(600)", wall_time_s=1.0, **LIMITS)
        assert execution.timed_out
        assert list(Path(folder).iterdir()) == []


def test_an_interpreter_that_does_not_start_is_refused(tmp_path):
    with pytest.raises(PluginError, match=r"no-python does not start(?s:.*)environment\.code\.python"):
        run("print(1)", isolation="limits", python=tmp_path / "no-python")


def test_a_launcher_that_fails_on_an_empty_program_is_a_broken_machine(tmp_path, monkeypatch):
    broken = tmp_path / "launcher.py"
    broken.write_text(textwrap.dedent("import sys\nsys.exit('no such module')"))
    monkeypatch.setattr(sandbox, "LAUNCHER", broken)
    with pytest.raises(Refused, match=r"launcher\.py.*no such module"):
        run("print(1)")


STUB = """
import json, os, sys
request = json.load(sys.stdin)
with open({starts!r}, "a") as starts:
    starts.write("x")
if request["files"]["main.py"] and os.path.getsize({starts!r}) <= {failures}:
    {failure}
print("its output")
sys.stderr.write(json.dumps({{"exit": 0, "cpu_time_s": 0.0, "timed_out": False}}))
"""
FAILURES = {
    "killed": "os.kill(os.getpid(), 9)",
    "silent": "os._exit(0)",
    "refused": """sys.stderr.write('{{"refused": "no space"}}'); sys.exit(3)""",
    "no report": "sys.stderr.write('[]'); sys.exit(0)",
    "forged": """sys.stderr.write('{{"exit": 0}}'); sys.exit(0)""",
    "traceback": "raise MemoryError",
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize(("failures", "num_starts", "output"), [(1, 2, b"its output\n"), (2, 3, b"")], ids=["once", "twice"])
def test_a_launcher_that_fails_on_a_program_alone_is_the_programs(tmp_path, monkeypatch, failure, failures, num_starts, output):
    starts, stub = tmp_path / "starts", tmp_path / "launcher.py"
    stub.write_text(STUB.format(starts=str(starts), failures=failures, failure=FAILURES[failure].format()))
    monkeypatch.setattr(sandbox, "LAUNCHER", stub)
    execution = run("print(1)")
    assert (len(starts.read_text()), execution.output) == (num_starts, output)
    assert execution.exit_code == (0 if failures == 1 else None)
    assert not execution.timed_out


def test_a_program_that_fills_its_folder_by_its_length_has_failed():
    execution = run(f"x = {'1' * 2**21}", max_disk_mib=1, **LIMITS)
    assert (execution.exit_code, execution.timed_out) in ((None, False), (1, False))
