"""Programs in processes of their own: their ends, and their time limit."""

import os
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
    outcome = run(["-S", "-c", code], 1)
    assert (outcome.code, outcome.ending) == (None, "did not end in time")
    until = time.monotonic() + 20
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
