"""Faults of the network between hosts do what they are named after, and end with their block."""

import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from .hosts import DataCentre, Host
from .network import Network
from .relay import relay
from .slow_names import answer

pytestmark = pytest.mark.wide
ROUND_TRIP = """
import socket, sys
with socket.create_connection((sys.argv[1], 9000)) as link:
    link.sendall(bytes(int(sys.argv[2])))
    link.shutdown(socket.SHUT_WR)
    number = 0
    while found := link.recv(2**16):
        number += len(found)
    print(number)
"""
ECHO = """
import socket
with socket.create_server(("", 9000), backlog=16) as server:
    print("up", flush=True)
    while True:
        link, _ = server.accept()
        with link:
            while data := link.recv(2**16):
                link.sendall(data)
"""


@pytest.fixture(scope="module")
def passes(centre: DataCentre) -> Iterator[Callable[..., bool]]:
    """A function that sends bytes from the first host to the second and back, and returns whether they came in time."""
    one, other = centre.hosts.values()
    other.popen(["python", "-c", ECHO])
    other.check(["sh", "-c", "until ss -ltn | grep -q :9000; do sleep 0.1; done"])

    def run(num_bytes: int = 1, limit_s: float = 120.0) -> bool:
        result = one.run(["timeout", str(limit_s), "python", "-c", ROUND_TRIP, other.address, str(num_bytes)])
        return result.returncode == 0 and int(result.stdout) == num_bytes

    yield run
    other.end_processes()


def test_delayed_packets_go_by_the_relay(centre: DataCentre, passes: Callable[..., bool]) -> None:
    with centre.network.delay([1, 2], 0.05):
        before = centre.network.num_received("delay0")
        assert passes(100_000)
        assert centre.network.num_received("delay0") > before
    assert passes()


def test_the_relay_gives_packets_back_in_order() -> None:
    packets = [bytes([number]) * 100 for number in range(20)]
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with one, other, subprocess.Popen(["sleep", "1000"], stdout=subprocess.PIPE) as until:
        thread = threading.Thread(target=relay, args=(one.fileno(), until.stdout, 0.01))
        thread.start()
        for packet in packets:
            other.send(packet)
        found = [other.recv(200) for _ in packets]
        until.kill()
        thread.join()
    assert found == packets


def test_a_rate_holds_packets_back(centre: DataCentre, passes: Callable[..., bool]) -> None:
    with centre.network.rate(2, 1_000_000):
        assert passes(200_000)
        assert centre.network.num_held_back(2) > 0
    assert passes()


def lost_packets(host: Host) -> int:
    """TCP segments that the host has sent again."""
    lines = [line.split() for line in host.check(["cat", "/proc/net/snmp"]).splitlines() if line.startswith("Tcp:")]
    return int(dict(zip(*lines, strict=True))["RetransSegs"])


def test_lost_packets_are_sent_again(centre: DataCentre, passes: Callable[..., bool]) -> None:
    before = lost_packets(centre.hosts[1])
    with centre.network.loss(2, 5):
        assert passes(3_000_000)
    assert lost_packets(centre.hosts[1]) > before


@pytest.mark.parametrize(
    "fault", [lambda network: network.cut(2), lambda network: network.partition([1], [2])], ids=["cut", "partition"]
)
def test_nothing_passes_while_a_link_is_cut(
    centre: DataCentre, passes: Callable[..., bool], fault: Callable[[Network], AbstractContextManager[None]]
) -> None:
    with fault(centre.network):
        assert not passes(limit_s=3.0)
    assert passes()


def test_names_are_answered_by_the_servers_table() -> None:
    question = b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x06host-1\x00\x00\x01\x00\x01"
    found = answer(question, {"host-1": "10.77.0.1"})
    assert found[:2] == question[:2]
    assert found.endswith(bytes([10, 77, 0, 1]))
    assert re.search(rb"host-1", found)
    assert answer(question, {})[3] & 0xF == 3
