"""A Ray cluster over the hosts of a data centre, as docs/cluster.md starts one, with a token."""

import re
import time
from collections import Counter
from pathlib import Path

from attrs import frozen

from .hosts import DataCentre, Host

PORT = 6379
OF_RAY = {"RAY_memory_monitor_refresh_ms": "0"}
"""Variables of Ray. The memory is the machine's, of which a host cannot say that it runs out."""
TOKEN = "0123456789abcdef" * 4
START_S = 180.0
"""Most seconds for the head to listen."""
LIGHT = ("--disable-usage-stats", "--num-cpus=2", "--object-store-memory=100000000", "--block")
"""Options that keep Ray small and in the foreground."""


def give_token(host: Host, token: str = TOKEN) -> None:
    """Put the token where Ray and runs look for it."""
    host.check(
        ["sh", "-c", 'mkdir -p ~/.ray && printf %s "$1" > ~/.ray/auth_token && chmod 600 ~/.ray/auth_token', "sh", token]
    )


def start_head(host: Host, *options: str) -> None:
    """Start Ray's head, and wait until it listens."""
    log = host.folder / "ray-head.log"
    with log.open("wb") as output:
        head = host.popen(["ray", "start", "--head", "--include-dashboard=false", *LIGHT, *options], output, **OF_RAY)
    deadline = time.monotonic() + START_S
    while PORT not in {listener.port for listener in listening(host)}:
        assert head.poll() is None, log.read_text()
        assert time.monotonic() < deadline, f"Ray's head does not listen: {log.read_text()}"
        time.sleep(0.2)


def start_node(host: Host, head: Host, *options: str, **variables: str) -> Path:
    """Start Ray on another host, which joins the head. Returns the file of what it says."""
    log = host.folder / "ray-node.log"
    with log.open("wb") as output:
        command = ["ray", "start", f"--address={head.name}:{PORT}", *LIGHT, *options]
        host.popen(command, output, **{"RAY_AUTH_MODE": "token", **OF_RAY, **variables})
    return log


def start_ray(centre: DataCentre, *, by_address: bool = False) -> None:
    """Start Ray on all hosts, the head on the first, and wait until all have joined. `by_address` names each host's address, as
    hosts with several networks need."""
    first, *others = centre.hosts.values()
    options = {host: [f"--node-ip-address={host.address}"] if by_address else [] for host in centre.hosts.values()}
    for host in centre.hosts.values():
        give_token(host)
    start_head(first, *options[first])
    for log in [start_node(host, first, *options[host]) for host in others]:
        await_joined(log)


def await_joined(log: Path) -> None:
    """Wait until a host has joined the head, by what Ray says on it."""
    deadline = time.monotonic() + START_S
    while "Ray runtime started" not in log.read_text():
        assert time.monotonic() < deadline, f"the host does not join: {log.read_text()}"
        time.sleep(0.2)


@frozen(kw_only=True)
class Listener:
    """A TCP socket that takes connections."""

    command: str
    """The command line of its process, or the name that Ray gives it."""
    pid: int
    address: str
    """One of the host's, or "*" for all of them."""
    port: int

    @property
    def is_of_ray_alone(self) -> bool:
        """Return whether its process belongs to the cluster, and not to a run."""
        is_of_run = "rlcore" in self.command or self.command.startswith("ray::Worker")
        return not is_of_run and ("/ray/" in self.command or self.command.startswith("ray::") or " -m ray." in self.command)


def listening(host: Host) -> set[Listener]:
    """Return where processes of the host take connections."""
    lines = (line.split(maxsplit=1) for line in host.check(["ps", "-ww", "-eo", "pid=,args="]).splitlines())
    commands = {int(pid): command for pid, command in lines}
    found = set()
    for line in host.check(["ss", "--listening", "--tcp", "--numeric", "--no-header", "--processes"]).splitlines():
        _, _, _, place, _, *owners = line.split()
        address, _, port = place.rpartition(":")
        name = address.strip("[]").removeprefix("::ffff:")
        for pid in map(int, re.findall(r"pid=(\d+)", " ".join(owners))):
            every = {"0.0.0.0": "*", "::": "*"}.get(name, name)
            found.add(Listener(command=commands.get(pid, ""), pid=pid, address=every, port=int(port)))
    return found


def open_beyond(host: Host) -> list[Listener]:
    """Return the sockets of runs that other networks reach. Each process that calls Ray has one on every interface, which asks
    for the token; they are left out."""
    of_runs = [listener for listener in listening(host) if not listener.is_of_ray_alone]
    calls_ray = {each.pid for each in of_runs if each.command.startswith("ray::Worker") or "rlcore train" in each.command}
    everywhere = Counter(each.pid for each in of_runs if each.address == "*")
    allowed = {(pid, "*") for pid, number in everywhere.items() if pid in calls_ray and number == 1}
    own = [each for each in of_runs if each.address == host.address or each.address.startswith("127.")]
    return [each for each in of_runs if each not in own and (each.pid, each.address) not in allowed]
