"""The network between hosts: a router with a link to each, and the faults of links: delay, rate, loss, cuts and partitions."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from attrs import define

RELAY = Path(__file__).with_name("relay.py")
DELAYED = 100
"""The number of the routing table of packets that the relay has not had yet."""
SETTINGS = ("net.ipv4.ip_forward=1", "net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.all.send_redirects=0")


@define(kw_only=True, eq=False)
class Network:
    """Links of hosts, numbered as these are. Each fault lasts as long as its block."""

    router: int
    """The process id of the router's first process."""
    address: str
    """The router's own."""
    prefix: str
    """The first three numbers of all addresses."""

    def set_up(self) -> None:
        """Make the router forward packets."""
        self._run("ip", "link", "set", "lo", "up")
        self._run("ip", "address", "add", f"{self.address}/32", "dev", "lo")
        for setting in SETTINGS:
            key, _, value = setting.partition("=")
            self._run("sh", "-c", f"echo {value} > /proc/sys/{key.replace('.', '/')}")
        self._run("nft", "add table inet faults; add chain inet faults forward { type filter hook forward priority 0; }")

    def join(self, number: int, process: int) -> None:
        """Link the network namespace of a process to the router, as the host of this number."""
        link, host = f"link{number}", _enter(process)
        self._run("ip", "link", "add", link, "type", "veth", "peer", "name", "peer")
        self._run("ip", "link", "set", "peer", "netns", str(process))
        self._run("ip", "link", "set", link, "up")
        self._run("ip", "route", "replace", f"{self.prefix}.{number}", "dev", link, "src", self.address)
        for command in (
            ["ip", "link", "set", "lo", "up"],
            ["ip", "link", "set", "peer", "name", "eth0"],
            ["ip", "address", "add", f"{self.prefix}.{number}/32", "dev", "eth0"],
            ["ip", "link", "set", "eth0", "up"],
            ["ip", "route", "add", self.address, "dev", "eth0"],
            ["ip", "route", "add", "default", "via", self.address],
        ):
            subprocess.run([*host, *command], check=True)

    @contextmanager
    def program(self, file: Path, *arguments: str) -> Iterator[None]:
        """Run a program of the router's, which says when it is ready, until the block ends."""
        command = [*_enter(self.router), sys.executable, "-I", "-S", str(file), *arguments]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n", f"{file.name} has ended"
                yield
            finally:
                process.kill()

    @contextmanager
    def delay(self, numbers: Sequence[int], seconds: float) -> Iterator[None]:
        """Packets from these hosts arrive as many seconds later."""
        with self.program(RELAY, "delay0", str(seconds)), ExitStack() as stack:
            self._run("ip", "link", "set", "delay0", "up")
            self._run("ip", "route", "add", "default", "dev", "delay0", "table", str(DELAYED))
            for number in numbers:
                rule = ("iif", f"link{number}", "lookup", str(DELAYED))
                self._run("ip", "rule", "add", *rule)
                stack.callback(self._run, "ip", "rule", "del", *rule)
            yield

    @contextmanager
    def rate(self, number: int, bits_per_s: int) -> Iterator[None]:
        """The host receives at most so much."""
        device = ("dev", f"link{number}", "root")
        self._run("tc", "qdisc", "add", *device, "tbf", "rate", f"{bits_per_s}bit", "burst", "16kb", "latency", "2s")
        yield
        self._run("tc", "qdisc", "del", *device)

    @contextmanager
    def loss(self, number: int, percent: int) -> Iterator[None]:
        """So many of a hundred packets to the host and from it get lost."""
        lost = f"numgen random mod 100 < {percent} drop"
        with self._rules(f"iifname link{number} {lost}", f"oifname link{number} {lost}"):
            yield

    @contextmanager
    def cut(self, number: int) -> Iterator[None]:
        """Nothing reaches the host, and nothing leaves it."""
        with self._rules(f"iifname link{number} drop", f"oifname link{number} drop"):
            yield

    @contextmanager
    def partition(self, one: Sequence[int], other: Sequence[int]) -> Iterator[None]:
        """Hosts of the one side and of the other do not reach each other."""
        pairs = [(a, b) for first in one for second in other for a, b in ((first, second), (second, first))]
        with self._rules(*(f"iifname link{a} oifname link{b} drop" for a, b in pairs)):
            yield

    def num_received(self, device: str) -> int:
        """Return the number of packets that the router has got from a device."""
        (found,) = json.loads(self._run("ip", "-json", "-statistics", "link", "show", device))
        return int(found["stats64"]["rx"]["packets"])

    def num_held_back(self, number: int) -> int:
        """Return how often the rate of a host's link has held a packet back."""
        (found,) = json.loads(self._run("tc", "-json", "-statistics", "qdisc", "show", "dev", f"link{number}", "root"))
        return int(found["overlimits"])

    @contextmanager
    def _rules(self, *rules: str) -> Iterator[None]:
        for rule in rules:
            self._run("nft", f"add rule inet faults forward {rule}")
        try:
            yield
        finally:
            self._run("nft", "flush chain inet faults forward")

    def _run(self, *command: str) -> str:
        return subprocess.run([*_enter(self.router), *command], check=True, stdout=subprocess.PIPE, text=True).stdout


def _enter(process: int) -> list[str]:
    """The beginning of a command that runs in the network of a process."""
    return ["nsenter", "--target", str(process), "--net", "--"]
