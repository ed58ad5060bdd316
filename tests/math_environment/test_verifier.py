"""The verifier's processes start with a reason or end with the run, and a response costs no more than its own."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from rlcore.spi import PluginError
from rlcore_math.verifier import Verifier


def test_a_worker_that_does_not_start_says_why(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no grammar')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    broken = Verifier(num_processes=1, timeout_s=5.0, max_memory_mib=1024)
    with pytest.raises(PluginError, match=r"(?s)math-5s-1024MiB.*ImportError: no grammar"):
        asyncio.run(broken.judge("1", "1", require_boxed=False))
    monkeypatch.undo()
    assert asyncio.run(broken.judge("1", "1", require_boxed=False)) == "right"
    broken.close()


SCRIPT = """
import asyncio, psutil, sys
from rlcore_math.verifier import Verifier
verifier = Verifier(num_processes=1, timeout_s=2.0, max_memory_mib=1024)
asyncio.run(verifier.judge("1", "1", require_boxed=False))
print(psutil.Process().children()[0].pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_the_run(sent):
    run = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    worker = int(run.stdout.readline())
    run.send_signal(sent)
    run.wait(300)
    deadline = time.monotonic() + 300
    while os.path.exists(f"/proc/{worker}") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{worker}")
    run.stdin.close()
    run.stdout.close()
