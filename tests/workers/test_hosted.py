"""The process of an engine is waited for no longer than it may take, and not hurried while the caller stood still."""

import os
import signal
import socket
import subprocess
import sys
import time

from rlcore_workers import hosted


def test_a_socket_that_does_not_listen_yet_is_waited_for():
    address = f"\0rlcore-test-{os.getpid()}"
    manager = hosted.HostManager(address=address, authkey=b"key")
    assert not hosted.connects(manager)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(address)
        assert not hosted.connects(manager)
    with hosted.HostManager(address=address, authkey=b"key"):
        assert hosted.connects(manager)


STOPPED_MEANWHILE = """
import time
from rlcore_workers.hosted import limited

with limited(3.0, lambda: print("ended", flush=True)):
    print("begun", flush=True)
    input()
    time.sleep(0.5)
print("answered")
with limited(0.5, lambda: print("ended", flush=True)):
    time.sleep(2)
"""


def test_no_engine_is_late_while_the_process_that_waits_for_it_stood_still():
    command = [sys.executable, "-c", STOPPED_MEANWHILE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout.readline() == "begun\n"
        waiting.send_signal(signal.SIGSTOP)
        time.sleep(4)
        waiting.send_signal(signal.SIGCONT)
        said, _ = waiting.communicate("\n", timeout=300)
    assert said == "answered\nended\n"
