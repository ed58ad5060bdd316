"""What goes wrong around a run: kinds of faults, each drawn at random among its processes, files and connections."""

import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import psutil
from attrs import frozen

from .run_processes import Role, marked, role

CLOCK = "RLCORE_CHAOS_CLOCK"
"""The environment variable of the file with the seconds that clocks are off."""
CLOCK_MODULE = f"""
import os, time

def _shifted(clock, unit):
    def now():
        try:
            with open(os.environ[{CLOCK!r}]) as file:
                return clock() + type(clock())(float(file.read()) * unit)
        except (KeyError, OSError, ValueError):
            return clock()
    return now

time.time, time.time_ns = _shifted(time.time, 1), _shifted(time.time_ns, 10**9)
"""
"""A sitecustomize that moves the clock of a run alone: setting the machine's would disturb all that runs there."""
LIMIT_BYTES = 2048
_PIDFD_GETFD = 438
"""The system call, by the number that all architectures share."""


@frozen(kw_only=True)
class Target:
    """A run that is under way."""

    driver: int
    mark: str
    directory: Path
    """The run's."""
    clock: Path
    """The file that CLOCK names."""

    def processes(self) -> dict[Role, list[psutil.Process]]:
        found: dict[Role, list[psutil.Process]] = {}
        for process in marked(self.mark):
            found.setdefault(role(process, self.driver), []).append(process)
        return found

    def draw(self, draws: random.Random) -> tuple[Role, psutil.Process] | None:
        """One of a role, each role as likely as the others."""
        processes = self.processes()
        if "driver" not in processes:
            return None
        chosen = draws.choice(sorted(processes))
        return chosen, draws.choice(processes[chosen])


@frozen(kw_only=True)
class Struck:
    """A fault that has come to pass."""

    what: str
    hold_s: float = 0.0
    """How long it lasts before `mend`."""
    mend: Callable[[], None] = lambda: None


def kill(target: Target, draws: random.Random) -> Struck | None:
    """Any process, at once."""
    if (drawn := target.draw(draws)) is None:
        return None
    drawn[1].kill()
    return Struck(what=drawn[0])


def kill_engine(target: Target, draws: random.Random) -> Struck | None:
    """One of the generators' engines, at once: the others generate what it had to."""
    if not (engines := target.processes().get("engine")):
        return None
    draws.choice(engines).kill()
    return Struck(what="engine")


def stop(target: Target, draws: random.Random) -> Struck | None:
    """Any process stands still: a rank or an engine until the run itself ends it, what only others can wait for until later."""
    if (drawn := target.draw(draws)) is None:
        return None
    kind, process = drawn
    process.suspend()
    if kind in ("rank", "engine"):
        return Struck(what=kind)
    return Struck(what=kind, hold_s=draws.uniform(1, 8), mend=partial(_continue, process))


def _continue(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.resume()


def full_disk(target: Target, draws: random.Random) -> Struck | None:
    """The file system of the run, which is small and its own, has no byte left."""
    runs = target.directory.parent
    if not runs.is_mount():
        return None
    ballast = runs / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(2**16))
    return Struck(what="runs", hold_s=draws.uniform(0.5, 5), mend=partial(ballast.unlink, missing_ok=True))


def file_limit(target: Target, draws: random.Random) -> Struck | None:
    """Driver and ranks may write no file that is longer than a few lines."""
    processes = target.processes()
    limited = [*processes.get("driver", []), *processes.get("rank", [])]
    before = [(process, process.rlimit(psutil.RLIMIT_FSIZE)) for process in limited]
    for process, (_, hard) in before:
        process.rlimit(psutil.RLIMIT_FSIZE, (LIMIT_BYTES, hard))

    def mend() -> None:
        for process, limits in before:
            with suppress(psutil.NoSuchProcess):
                process.rlimit(psutil.RLIMIT_FSIZE, limits)

    return Struck(what="driver, ranks", hold_s=draws.uniform(0.5, 5), mend=mend) if before else None


def read_only(target: Target, draws: random.Random) -> Struck | None:
    """Nothing can be written below checkpoints/. Who may write everywhere is held off by a mount."""
    folder = target.directory / "checkpoints"
    if not folder.is_dir():
        return None
    if os.geteuid():
        folder.chmod(0o555)
        return Struck(what="checkpoints", hold_s=draws.uniform(0.5, 5), mend=partial(folder.chmod, 0o755))
    if not mount("--bind", str(folder), str(folder)):
        return None
    mend = partial(unmount, folder)
    if not mount("-o", "remount,bind,ro", str(folder)):
        mend()
        return None
    return Struck(what="checkpoints", hold_s=draws.uniform(0.5, 5), mend=mend)


def changed_byte(target: Target, draws: random.Random) -> Struck | None:
    """One byte of the newest checkpoint is another; the driver is killed, so that it is read."""
    if (file := _checkpoint_file(target, draws)) is None:
        return None
    content = bytearray(file.read_bytes())
    content[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
    file.write_bytes(content)
    os.kill(target.driver, signal.SIGKILL)
    return Struck(what=file.name)


def truncated(target: Target, draws: random.Random) -> Struck | None:
    """A file of the newest checkpoint ends too early; the driver is killed, so that it is read."""
    if (file := _checkpoint_file(target, draws)) is None:
        return None
    size = file.stat().st_size
    os.kill(target.driver, signal.SIGKILL)
    end = time.monotonic() + 10
    # Nobody else may wait for the driver: who does so last never learns how it ended.
    while any(process.pid == target.driver for process in marked(target.mark)) and time.monotonic() < end:
        time.sleep(0.01)
    os.truncate(file, draws.randrange(size))
    return Struck(what=file.name)


def _checkpoint_file(target: Target, draws: random.Random) -> Path | None:
    for checkpoint in sorted((target.directory / "checkpoints").glob("step-*"), reverse=True):
        if files := sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size):
            return draws.choice(files)
    return None


def clock_jump(target: Target, draws: random.Random) -> Struck | None:
    """Python's clock in all processes leaps by minutes to days, either way, and later back."""
    seconds = draws.choice([-1, 1]) * 10 ** draws.uniform(2, 5)
    target.clock.write_text(f"{seconds:.0f}")
    return Struck(what="all", hold_s=draws.uniform(1, 5), mend=partial(target.clock.write_text, "0"))


def lost_connection(target: Target, draws: random.Random) -> Struck | None:
    """One connection of any process over TCP, shut down from outside, at both ends."""
    if (drawn := target.draw(draws)) is None:
        return None
    kind, process = drawn
    open_ones = [
        each for each in process.net_connections(kind="tcp") if each.status == psutil.CONN_ESTABLISHED and each.fd >= 0
    ]
    if not open_ones:
        return None
    handle = os.pidfd_open(process.pid)
    try:
        descriptor = ctypes.CDLL(None).syscall(_PIDFD_GETFD, handle, draws.choice(open_ones).fd, 0)
    finally:
        os.close(handle)
    if descriptor < 0:
        return None
    with closing(socket.socket(fileno=descriptor)) as copy:
        copy.shutdown(socket.SHUT_RDWR)
    return Struck(what=kind)


FAULTS: Mapping[str, Callable[[Target, random.Random], Struck | None]] = {
    "kill": kill,
    "kill engine": kill_engine,
    "stop": stop,
    "full disk": full_disk,
    "file limit": file_limit,
    "read-only": read_only,
    "changed byte": changed_byte,
    "truncated file": truncated,
    "clock": clock_jump,
    "connection": lost_connection,
}
"""Each returns None where there is nothing to hit, or this machine does not let it."""


def mount(*arguments: str) -> bool:
    """Whether it was done, which takes rights that not every machine gives."""
    command = shutil.which("mount")
    return command is not None and subprocess.run([command, *arguments], capture_output=True).returncode == 0


def unmount(folder: Path) -> None:
    """Also where a process still has something open there."""
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
