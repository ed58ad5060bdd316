"""A driver that Ray's core ends is told of; others are not."""

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from rlcore_ray import raylet_watchdog

pytest.importorskip("ray")

WITH_STAND_IN = """
import os, signal, sys
from types import SimpleNamespace
from ray._private import worker
from rlcore_ray.raylet_watchdog import raylet_watchdog

worker._global_node = SimpleNamespace(raylet_socket_name=sys.argv[1], get_logs_dir_path=lambda: "/logs")
try:
    with raylet_watchdog():
        exec(sys.argv[2])
finally:
    worker._global_node = None
"""
WITH_RAY = """
import ray, sys
from rlcore_ray.config import RayConfig
from rlcore_ray.session import ray_session

with ray_session(RayConfig(gpus_per_node=2, object_store_mib=100), "cpu", None):
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
    done = subprocess.run([sys.executable, "-c", WITH_STAND_IN, name, end], capture_output=True, text=True, timeout=300)
    return done.stderr


@pytest.mark.parametrize("end", ["pass", "os._exit(1)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_nothing_is_said_where_the_raylet_lives(raylet: str, end: str) -> None:
    assert ended(raylet, end) == ""


def test_nothing_is_said_of_a_driver_that_has_said_farewell(raylet: str) -> None:
    os.unlink(raylet)
    assert ended(raylet, "pass") == ""


def test_an_interrupt_is_the_drivers_own(raylet: str) -> None:
    """Also one that comes as soon as there is a process that it could reach."""
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
            said = driver.communicate(timeout=300)[1]
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


@pytest.mark.wide  # Ray takes half a minute to give it up; below a stand-in for Ray does so at once
def test_a_raylet_that_stands_still_is_ended_and_told() -> None:
    """The driver would wait for its store for ever."""
    code, said = raylet_gets(signal.SIGSTOP)
    assert code == 1
    assert "(the raylet, process" in said
    assert "Ray's core ended it" in said


WITH_A_STOPPED_HEAD = """
import ray, signal
from ray._private import worker
from rlcore_ray.config import RayConfig
from rlcore_ray import raylet_watchdog
from rlcore_ray.session import ray_session

raylet_watchdog.LEAVE_S = 1.0
with ray_session(RayConfig(gpus_per_node=2, object_store_mib=100), "cpu", None):
    (head,) = worker._global_node.all_processes["gcs_server"]
    head.process.send_signal(signal.SIGSTOP)
raise SystemExit(7)
"""


def test_a_head_that_stands_still_keeps_no_run_from_its_end() -> None:
    command = [sys.executable, "-c", WITH_A_STOPPED_HEAD]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    said = done.stderr.splitlines()
    assert said[0] == raylet_watchdog.HEAD_ENDED
    # Ray's core ends a process with 1 that still asks the head for something as the head is killed, a minute later.
    assert (done.returncode, said[1:]) == (7, []) or (done.returncode == 1 and "GCS" in said[1])


WITH_THREADS_THAT_RAISE = """
import ray, threading
from rlcore_ray.raylet_watchdog import leave

def fail(text):
    raise ValueError(text)

def shutdown():
    for name in ("ray_listens", "mine"):
        thread = threading.Thread(target=fail, args=(f"raised in {name}",), name=name)
        thread.start()
        thread.join()

ray.shutdown = shutdown
leave()
"""


def test_what_rays_own_threads_raise_as_their_head_ends_is_not_told() -> None:
    done = subprocess.run([sys.executable, "-c", WITH_THREADS_THAT_RAISE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert "raised in mine" in done.stderr
    assert "ray_listens" not in done.stderr


def test_a_head_of_others_that_stands_still_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray is a stand-in: the real one would not end."""
    import ray
    from ray._private import worker

    def wait() -> None:
        (watching,) = (each for each in threading.enumerate() if each.name == "ray-head")
        watching.join(300)

    monkeypatch.setattr(worker, "_global_node", SimpleNamespace(all_processes={}, is_head=lambda: False))
    monkeypatch.setattr(raylet_watchdog, "LEAVE_S", 0.1)
    monkeypatch.setattr(ray, "shutdown", wait)
    raylet_watchdog.leave()
    assert capsys.readouterr().err == raylet_watchdog.HEAD_AWAITED.format(pid=os.getpid()) + "\n"


class GivenUp:
    """A cluster that has given this node up, and the signals that are sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        import ray

        self._capsys = capsys
        self.said = ""
        """On stderr, by the time at which the raylet is ended."""
        self.is_over = threading.Event()
        self.killed: list[int] = []
        self.when_asked: Callable[[], object] = lambda: None
        monkeypatch.setattr(raylet_watchdog, "LOOK_S", 0.01)
        monkeypatch.setattr(ray, "nodes", self._nodes)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
        monkeypatch.setattr(os, "kill", lambda pid, _: self.killed.append(pid))
        monkeypatch.setattr(signal, "pidfd_send_signal", self._send)

    def ends_after(self, num_looks: int) -> None:
        """The run ends as the cluster is asked about this node for the last of so many times."""
        looks = iter(range(1, num_looks))
        self.when_asked = lambda: None if next(looks, None) else self.is_over.set()

    def _nodes(self) -> list[dict[str, object]]:
        self.when_asked()
        return [{"NodeID": "there", "Alive": True}, {"NodeID": "here", "Alive": False}]

    def _send(self, process: int, number: int) -> None:
        if not number:  # asks whether it may
            return
        self.said = self._capsys.readouterr().err
        fields = Path(f"/proc/self/fdinfo/{process}").read_text().split()
        self.killed.append(int(fields[fields.index("Pid:") + 1]))


@pytest.fixture
def given_up(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> GivenUp:
    return GivenUp(monkeypatch, capsys)


@pytest.mark.parametrize("ends", [False, True])
def test_a_raylet_that_is_given_up_as_the_run_ends_is_let_be(raylet: str, ends: bool, given_up: GivenUp) -> None:
    """Ray itself does so then. Else it is ended, by the number that its socket tells: here this process's."""
    if ends:
        given_up.when_asked = given_up.is_over.set
    raylet_watchdog.end_where_it_stands_still(raylet, given_up.is_over)
    assert given_up.killed == ([] if ends else [os.getpid()])
    # Ray's core ends this process as soon as its raylet is gone: nothing is said after that.
    assert (raylet_watchdog.ENDED in given_up.said) == (not ends)


def test_a_raylet_that_was_started_in_the_place_of_the_one_that_is_gone_is_let_be(
    given_up: GivenUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It listens at the same socket, and does the work of others."""
    monkeypatch.chdir(tmp_path)
    listen = "import socket; s = socket.socket(socket.AF_UNIX); s.bind('raylet'); s.listen(); print(flush=True); input()"

    def start() -> subprocess.Popen[bytes]:
        begun = subprocess.Popen([sys.executable, "-c", listen], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert begun.stdout is not None
        begun.stdout.readline()
        return begun

    started = [start()]

    def replaced() -> None:
        if len(started) == 1:
            started[0].communicate()
            os.unlink("raylet")
            started.append(start())

    given_up.when_asked = replaced
    raylet_watchdog.end_where_it_stands_still("raylet", given_up.is_over)
    started[1].communicate()
    assert given_up.killed == []
    assert capsys.readouterr().err == ""


def test_a_raylet_of_a_container_that_is_not_seen_is_let_be(
    raylet: str, given_up: GivenUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system tells its number as 0, by which a signal goes to all of this process's group."""
    # In that module alone: pytest-xdist's own thread unpacks what it is sent meanwhile.
    monkeypatch.setattr(raylet_watchdog, "struct", SimpleNamespace(calcsize=struct.calcsize, unpack=lambda *_: (0, 0, 0)))
    given_up.ends_after(5)
    raylet_watchdog.end_where_it_stands_still(raylet, given_up.is_over)
    assert given_up.killed == []


def test_a_raylet_that_may_not_be_ended_is_told_once(
    raylet: str, given_up: GivenUp, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    monkeypatch.setattr(os, "kill", refuse)
    given_up.ends_after(5)
    raylet_watchdog.end_where_it_stands_still(raylet, given_up.is_over)
    said = capsys.readouterr().err
    assert said.count("error: ") == 1
    assert raylet_watchdog.NOT_ENDED in said
