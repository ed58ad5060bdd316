"""Watches the raylet and the cluster's head: reports why the driver ends when one dies, and ends it when one hangs."""

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CLOSE_S = 5.0
"""Most seconds for the process that waits to end."""
MESSAGE = (
    "error: this run's process has ended without a word of its own: it was killed, or Ray's core ended it, as it does where "
    "Ray's own process on the machine (the raylet) dies. Ray's logs are in {logs}. What was saved before is intact: start the "
    "run again, with --resume to go on from there."
)
LOOK_S = 5.0
"""Seconds between two questions to the cluster whether it has given this machine up."""
STANDS_STILL = (
    "error: Ray's own process on this machine (the raylet, process {pid}) answers nothing, and its cluster has given it up."
)
ENDED = "It is ended, since this run's process would wait for it for ever."
NOT_ENDED = "It is another user's: end it, or this run's process, which waits for it for ever."
LEAVE_S = 90.0
"""Seconds that leaving a cluster may take; a head that was stopped for a minute still answers."""
HEAD_ENDED = "error: Ray does not let this process go as the run ends: its head process on this machine is ended."
HEAD_AWAITED = (
    "error: Ray does not let this process go as the run ends, as where the head of its cluster answers nothing: end it "
    "(process {pid}) if it does not end. What was saved is intact."
)
_FAREWELL = b"."
_WAIT = f"""
import socket, sys
if sys.stdin.buffer.read() != {_FAREWELL!r}:
    with socket.socket(socket.AF_UNIX) as raylet:
        try:
            raylet.connect(sys.argv[1])
        except OSError:
            sys.exit(sys.argv[2])
"""
"""The program reads until its parent sends the farewell or ends. A raylet that still lives was not the cause; one that is gone
may have died of its driver's death, as one that this run started does."""


@contextmanager
def raylet_watchdog() -> Iterator[None]:
    """Run a process that reports on stderr what ended this one, where Ray's core does, and a thread that ends a raylet which
    hangs after the cluster has given it up."""
    from ray._private import worker

    node = worker._global_node
    if node is None:  # a client of a distant cluster has no raylet here
        yield
        return
    message = MESSAGE.format(logs=Path(node.get_logs_dir_path()))
    command = [sys.executable, "-I", "-S", "-c", _WAIT, node.raylet_socket_name, message]
    with _without_interrupts():  # from its first moment on: what it had to ignore itself would reach it before that
        started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    with started as waiting:
        is_over = threading.Event()
        arguments = node.raylet_socket_name, is_over
        watching = threading.Thread(target=end_where_it_stands_still, args=arguments, name="raylet", daemon=True)
        watching.start()
        try:
            yield
        finally:
            is_over.set()
            watching.join(CLOSE_S)
            with suppress(BrokenPipeError, subprocess.TimeoutExpired):
                waiting.communicate(_FAREWELL, CLOSE_S)
            waiting.kill()


def leave() -> None:
    """Leave Ray's cluster. End a head of this process's own that answers nothing, since Ray would wait for ever; report
    another's."""
    import ray

    has_left = threading.Event()
    threading.Thread(target=_end_a_head_that_stands_still, args=(has_left,), name="ray-head", daemon=True).start()
    try:
        with _without_tracebacks_of_rays_threads():
            ray.shutdown()
    finally:
        has_left.set()


def _end_a_head_that_stands_still(has_left: threading.Event) -> None:
    from ray._private import ray_constants, worker

    node = worker._global_node
    if node is None or has_left.wait(LEAVE_S):
        return
    started = node.all_processes.get(ray_constants.PROCESS_TYPE_GCS_SERVER, [])
    for each in started:
        each.process.kill()
    print(HEAD_ENDED if node.is_head() else HEAD_AWAITED.format(pid=os.getpid()), file=sys.stderr, flush=True)


@contextmanager
def _without_tracebacks_of_rays_threads() -> Iterator[None]:
    """One of them still listens to the head where that is ended, and raises what nobody catches."""
    say = threading.excepthook

    def say_of_others(failure: threading.ExceptHookArgs) -> None:
        if failure.thread is None or not failure.thread.name.startswith("ray_"):
            say(failure)

    threading.excepthook = say_of_others
    try:
        yield
    finally:
        threading.excepthook = say


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """A process that is started here never gets one. This thread gets one that comes now when it leaves."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_where_it_stands_still(raylet: str, is_over: threading.Event) -> None:
    """End the raylet at a socket if it lives LOOK_S after the cluster has given its node up: a working one learns of that and
    ends."""
    import ray

    with suppress(OSError, AttributeError), _listening_at(raylet) as (pid, process):  # systems without handles of processes
        while not is_over.wait(LOOK_S):
            with suppress(Exception):  # where the cluster's head answers nothing, Ray's core ends this process
                here = ray.get_runtime_context().get_node_id()
                nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
                is_given_up = any(each["NodeID"] == here and not each["Alive"] for each in nodes)
                if is_given_up and not is_over.wait(LOOK_S):  # at the end Ray itself gives it up
                    _end(pid, process)
                    return


def _end(pid: int, process: int) -> None:
    handle = select.poll()
    handle.register(process, select.POLLIN)
    if handle.poll(0):
        return  # it has ended
    try:
        signal.pidfd_send_signal(process, 0)
    except PermissionError:
        done = NOT_ENDED
    else:
        done = ENDED
    # First, since Ray's core ends this process as soon as its raylet is gone.
    print(f"{STANDS_STILL.format(pid=pid)} {done}", file=sys.stderr, flush=True)
    if done is ENDED:
        signal.pidfd_send_signal(process, signal.SIGKILL)


@contextmanager
def _listening_at(name: str) -> Iterator[tuple[int, int]]:
    """Yield the number and a handle of the process behind a Unix socket, also where it hangs; the number or socket may be
    another's later. OSError where it is gone, or in a container whose processes this one does not see."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(name)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    process = os.pidfd_open(pid)  # refused for 0, as which the system tells a process that is not to be seen
    try:
        yield pid, process
    finally:
        os.close(process)
