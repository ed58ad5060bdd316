"""A Ray cluster over the hosts of a data centre, as docs/cluster.md starts one, with a token."""

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import frozen

from .hosts import DataCentre, Host

PORT = 6379
OF_RAY = {"RAY_memory_monitor_refresh_ms": "0"}
"""Variables of Ray. The memory is the machine's, of which a host cannot say that it runs out."""
TOKEN = "0123456789abcdef" * 4
START_S = 180.0
"""Most seconds for the head to listen."""
LIGHT = ("--disable-usage-stats", "--object-store-memory=100000000", "--block")
"""Options that keep Ray small and in the foreground."""


def give_token(host: Host, token: str = TOKEN) -> None:
    """Put the token where Ray and runs look for it."""
    host.check(
        ["sh", "-c", 'mkdir -p ~/.ray && printf %s "$1" > ~/.ray/auth_token && chmod 600 ~/.ray/auth_token', "sh", token]
    )


def start_head(host: Host, num_cpus: int = 2) -> None:
    """Start Ray's head, and wait until it listens."""
    command = ["ray", "start", "--head", "--include-dashboard=false", f"--num-cpus={num_cpus}", *LIGHT]
    with (host.folder / "ray-head.log").open("ab") as output:
        head = host.popen(command, output, **OF_RAY)
    deadline = time.monotonic() + START_S
    while PORT not in {listener.port for listener in listening(host)}:
        assert head.poll() is None, (host.folder / "ray-head.log").read_text()
        assert time.monotonic() < deadline, f"Ray's head does not listen: {(host.folder / 'ray-head.log').read_text()}"
        time.sleep(0.2)


def start_node(host: Host, head: Host, num_cpus: int = 2, variables: Mapping[str, str] | None = None) -> Path:
    """Start Ray on another host, which joins the head. Returns the file of what it says."""
    command = ["ray", "start", f"--address={head.name}:{PORT}", f"--num-cpus={num_cpus}", *LIGHT]
    log = host.folder / "ray-node.log"
    with log.open("wb") as output:
        host.popen(command, output, **{"RAY_AUTH_MODE": "token", **OF_RAY, **(variables or {})})
    return log


def start_ray(centre: DataCentre, numbers: Sequence[int] = (1, 2), num_cpus: int = 2) -> None:
    """Start Ray on these hosts, the head on the first, and wait until all have joined."""
    hosts = [centre.hosts[number] for number in numbers]
    for host in hosts:
        give_token(host)
    start_head(hosts[0], num_cpus)
    for log in [start_node(host, hosts[0], num_cpus) for host in hosts[1:]]:
        _await_text(log, "Ray runtime started")


@frozen(kw_only=True)
class Listener:
    """A TCP socket that takes connections."""

    process: str
    """The name of its process."""
    pid: int
    address: str
    """One of the host's, or "*" for all of them."""
    port: int


def _await_text(file: Path, text: str) -> None:
    deadline = time.monotonic() + START_S
    while text not in file.read_text():
        assert time.monotonic() < deadline, f"no {text!r} in: {file.read_text()}"
        time.sleep(0.2)


def listening(host: Host) -> set[Listener]:
    """Return where processes of the host take connections."""
    found = set()
    for line in host.check(["ss", "--listening", "--tcp", "--numeric", "--no-header", "--processes"]).splitlines():
        _, _, _, place, _, *owners = line.split()
        address, _, port = place.rpartition(":")
        for process, pid in re.findall(r'"([^"]*)",pid=(\d+)', " ".join(owners)):
            name = address.strip("[]").removeprefix("::ffff:")
            found.add(
                Listener(process=process, pid=int(pid), address={"0.0.0.0": "*", "::": "*"}.get(name, name), port=int(port))
            )
    return found
