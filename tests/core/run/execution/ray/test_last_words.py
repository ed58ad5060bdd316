"""A driver that Ray's core ends is told of; others are not."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray")

WITH_STAND_IN = """
import os, signal, sys
from types import SimpleNamespace
from ray._private import worker
from rlcore.run.execution.ray.last_words import said_for_ray

worker._global_node = SimpleNamespace(raylet_socket_name=sys.argv[1], get_logs_dir_path=lambda: "/logs")
try:
    with said_for_ray():
        exec(sys.argv[2])
finally:
    worker._global_node = None
"""
WITH_RAY = """
import ray, sys
from rlcore.config.cluster import ClusterConfig
from rlcore.run.execution.ray.session import ray_session

with ray_session(ClusterConfig(gpus_per_node=2, object_store_mib=100), "cpu", None):
    print("begun", flush=True)
    while True:
        ray.put(b"")
"""


@pytest.fixture
def raylet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a socket at which something listens."""
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("raylet")
        listening.listen()
        yield "raylet"


def ended(name: str, end: str) -> str:
    """What is said of a driver that ends so, and by all that it started: stderr is closed by then."""
    done = subprocess.run([sys.executable, "-c", WITH_STAND_IN, name, end], capture_output=True, text=True, timeout=120)
    return done.stderr


@pytest.mark.parametrize("end", ["pass", "os._exit(1)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_nothing_is_said_where_the_raylet_lives(raylet: str, end: str) -> None:
    assert ended(raylet, end) == ""


def test_nothing_is_said_of_a_driver_that_has_said_farewell(raylet: str) -> None:
    os.unlink(raylet)
    assert ended(raylet, "pass") == ""


def test_an_interrupt_is_the_drivers_own(raylet: str) -> None:
    told = ended(raylet, "import psutil; psutil.Process().children()[0].send_signal(signal.SIGINT); raise SystemExit(3)")
    assert told == ""


def test_the_raylets_death_is_told() -> None:
    """Ray's core ends the driver by the next thing that it asks of its store."""
    command = [sys.executable, "-c", WITH_RAY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "begun\n"
        children = psutil.Process(driver.pid).children()
        next(each for each in children if Path(each.cmdline()[0]).name == "raylet").send_signal(signal.SIGKILL)
        said = driver.communicate(timeout=120)[1]
    assert driver.returncode == 1
    assert "Ray's core ended it" in said
