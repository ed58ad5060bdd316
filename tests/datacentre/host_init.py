"""First process of a host, in namespaces of its own: it sets the host up, reports "ready", and reaps what others leave behind.

Run by Python alone, with a JSON object as its argument. The kernel ends every process of the host with it. It ends with its
standard input: a test run that is killed leaves no host behind.
"""

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

LOOK_S = 0.5
"""Seconds between two looks for processes that have ended."""
OWN_FOLDERS = ("/dev/shm", "/run")
"""Folders beside /tmp that each host has for itself."""


def mount(*arguments: str) -> None:
    """Mount something. CalledProcessError where the system refuses."""
    subprocess.run(["mount", *arguments], check=True)


def own_temporary_folder(stage: str, shared: Sequence[str]) -> None:
    """Give the host an empty /tmp, in which the shared folders below /tmp keep their place."""
    mount("-t", "tmpfs", "tmpfs", stage)
    os.chmod(stage, 0o1777)
    for folder in shared:
        place = Path(stage) / Path(folder).relative_to("/tmp")
        place.mkdir(parents=True)
        mount("--rbind", folder, str(place))
    mount("--move", stage, "/tmp")


def set_up(name: str, stage: str, shared: Sequence[str], files: Mapping[str, str]) -> None:
    """Name the host, and give it folders and files of its own. `files` has the sources of files such as /etc/hosts."""
    socket.sethostname(name)
    own_temporary_folder(stage, shared)
    for folder in OWN_FOLDERS:
        mount("-t", "tmpfs", "tmpfs", folder)
    for place, source in files.items():
        mount("--bind", source, place)


def reap() -> None:
    """Wait for processes that have ended, whoever started them, until standard input ends."""
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], LOOK_S)
        if readable and not os.read(sys.stdin.fileno(), 1):
            return
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    if order:
        set_up(**order)
    print("ready", flush=True)
    reap()
