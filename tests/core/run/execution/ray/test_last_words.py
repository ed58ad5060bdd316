"""A driver that Ray's core ends is told of; others are not."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from rlcore.run.execution.ray import last_words

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


def raylet_gets(number: signal.Signals) -> tuple[int, str]:
    """How a driver ends whose raylet gets a signal, and what is said of it."""
    command = [sys.executable, "-c", WITH_RAY]
    soon = {
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_timeout_ms": "1000",
        "RAY_health_check_failure_threshold": "15",
    }
    variables = {**os.environ, **soon}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "begun\n"
        children = psutil.Process(driver.pid).children()
        raylet = next(each for each in children if Path(each.cmdline()[0]).name == "raylet")
        raylet.send_signal(number)
        try:
            said = driver.communicate(timeout=120)[1]
        finally:
            if driver.poll() is None:
                raylet.kill()
        return driver.returncode, said


def test_the_raylets_death_is_told() -> None:
    """Ray's core ends the driver by the next thing that it asks of its store."""
    code, said = raylet_gets(signal.SIGKILL)
    assert code == 1
    assert "Ray's core ended it" in said
    assert "answers nothing" not in said


def test_a_raylet_that_stands_still_is_ended_and_told() -> None:
    """The driver would wait for its store for ever."""
    code, said = raylet_gets(signal.SIGSTOP)
    assert code == 1
    assert "(the raylet, process" in said
    assert "Ray's core ended it" in said


@pytest.mark.parametrize("ends", [False, True])
def test_a_raylet_that_is_given_up_as_the_run_ends_is_let_be(raylet: str, ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself does so then. Else it is ended, by the number that its socket tells: here this process's."""
    import ray

    is_over, killed = threading.Event(), list[tuple[int, int]]()

    def nodes() -> list[dict[str, object]]:
        if ends:
            is_over.set()
        return [{"NodeID": "there", "Alive": True}, {"NodeID": "here", "Alive": False}]

    monkeypatch.setattr(last_words, "LOOK_S", 0.0)
    monkeypatch.setattr(ray, "nodes", nodes)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    monkeypatch.setattr(os, "kill", lambda *given: killed.append(given))
    last_words.end_where_it_stands_still(raylet, is_over)
    assert killed == ([] if ends else [(os.getpid(), signal.SIGKILL)])
