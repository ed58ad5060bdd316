"""Programs in processes of their own: their ends, and their time limit."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlcore_doctor.child import run


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("print('told')", "ended with code 0"),
        ("import sys; sys.exit('a reason')", "ended with code 1: a reason"),
        ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("import sys; sys.exit('noise\\n' * 2**20 + 'the real reason')", "ended with code 1: the real reason"),
        ("import sys; sys.exit('a' * 2**20)", f"ended with code 1: {'a' * 300}"),
    ],
)
def test_how_it_ends(code: str, ending: str) -> None:
    outcome = run(["-c", code], 60)
    assert outcome.ending == ending
    assert outcome.output == ("told\n" if "told" in code else "")


def test_one_that_does_not_end_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(file)!r}, 'w').write(str(child.pid))\ntime.sleep(600)"
    )
    for limit_s in (1, 10, 100):  # a busy machine may have started nothing by then
        outcome = run(["-S", "-c", code], limit_s)
        assert (outcome.code, outcome.ending) == (None, "did not end in time")
        if file.exists() and file.read_text():
            break
    until = time.monotonic() + 300
    while Path(f"/proc/{file.read_text()}/stat").exists() and time.monotonic() < until:
        if Path(f"/proc/{file.read_text()}/stat").read_text().split()[2] == "Z":
            break
        os.sched_yield()
    else:
        assert time.monotonic() < until


def test_the_folder_that_it_runs_in_is_no_source_of_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    assert run(["-c", "import json"], 60).code == 0


PROGRAM = """
from rlcore_doctor import child, libraries
libraries.MODULES = dict.fromkeys("abc", "slow")
found = dict.fromkeys("abc")
with child.sigterm_raises():
    libraries.libraries(found, 600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_imports(tmp_path: Path, number: signal.Signals) -> None:
    source = f"import os, time\nopen({str(tmp_path)!r} + f'/{{os.getpid()}}.pid', 'w').close()\ntime.sleep(600)\n"
    (tmp_path / "slow.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 300
    while not list(tmp_path.glob("*.pid")) and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(300) == (143 if number == signal.SIGTERM else -signal.SIGINT)
    assert not [one for one in tmp_path.glob("*.pid") if Path(f"/proc/{one.stem}/cwd").exists()]
