"""Hosts of the data centre: what each has for itself, what they share, and that nothing is left of them."""

import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from .hosts import DataCentre, data_centre

pytestmark = pytest.mark.wide


def test_each_host_has_its_own_name_address_and_folders(centre: DataCentre) -> None:
    for host in centre.hosts.values():
        host.check(["sh", "-c", "echo $HOSTNAME > /tmp/mine; echo shm > /dev/shm/mine"])
        assert host.check(["hostname"]).strip() == host.name
        assert f"inet {host.address}/32" in host.check(["ip", "address", "show", "eth0"])
    one, other = centre.hosts.values()
    assert one.check(["sh", "-c", "ls /tmp/mine /dev/shm"]).split() == ["/tmp/mine", "/dev/shm:", "mine"]
    one.check(["rm", "/tmp/mine"])
    other.check(["cat", "/tmp/mine"])


def test_hosts_share_one_folder_and_reach_each_other_by_name(centre: DataCentre) -> None:
    one, other = centre.hosts.values()
    one.check(["sh", "-c", "echo from-one > message"])
    assert other.check(["cat", "message"]).strip() == "from-one"
    program = "import socket; print(socket.gethostbyname('host-2'), socket.create_connection(('host-2', 9000), 60).recv(9))"
    server = (
        "import socket; s = socket.create_server(('host-2', 9000)); print('up', flush=True); s.accept()[0].sendall(b'hello')"
    )
    with other.popen(["python", "-c", server], subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert one.check(["python", "-c", program]).split() == [other.address, "b'hello'"]


def test_the_machine_reaches_no_host(centre: DataCentre) -> None:
    addresses = {each.address for found in psutil.net_if_addrs().values() for each in found}
    assert not addresses & {host.address for host in centre.hosts.values()}


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """Not of processes that ignore signals and have left their session either."""
    (tmp_path / "shared").mkdir()
    with data_centre(tmp_path / "hosts", tmp_path / "shared", 2) as centre:
        host = centre.hosts[1]
        host.popen(["sh", "-c", "trap '' TERM INT HUP; setsid sleep 1000 & sleep 1000"])
        host.await_process("sleep")
        started = [*centre.processes(), *(psutil.Process(namespaces.first) for namespaces in centre.namespaces())]
        assert len(started) >= 4
    assert not [process for process in started if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    assert not [name for _, name in socket.if_nameindex() if name.startswith(("link", "peer", "delay"))]
