"""Hosts of a small data centre: each has a network, a /tmp, a hostname and process ids of its own, and they share a folder.

A router joins the hosts, in a network namespace of its own. Each namespace lives as long as its first process: nothing is left
where that ends, and no address, route or device is added to the machine itself.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil
from attrs import define, field, frozen

from .network import Network

ROOT = Path(__file__).parents[2]
INIT = Path(__file__).with_name("host_init.py")
NAMES = Path(__file__).with_name("slow_names.py")
NETWORK = "10.77.0"
ROUTER = f"{NETWORK}.254"
PUBLIC = "192.0.2"
PROGRAMS = ("ip", "tc", "nft", "ss", "unshare", "nsenter", "mount")
TUN = Path("/dev/net/tun")
END_S = 60.0
"""Most seconds for the kernel to end all processes of a host."""
RUN_S = 300.0
"""Most seconds for a command that is waited for."""
PASSED = ("PYTHONPYCACHEPREFIX", "LANG")
"""Variables of this process that hosts get too."""


def unavailable() -> str | None:
    """Return why this machine holds no data centre; None where it does."""
    if os.geteuid():
        return "network namespaces need root"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"missing: {', '.join(missing)}. Run: apt-get install iproute2 nftables util-linux"
    if not TUN.exists():
        return f"missing: {TUN}, by which the relay delays packets"
    return None


@frozen(kw_only=True)
class Namespaces:
    """Namespaces, and the process that keeps them."""

    keeper: subprocess.Popen[str]
    """`unshare`, with which the first process ends."""
    first: int
    """The process id, seen from outside, of the namespaces' first process."""

    @classmethod
    def make(cls, kinds: Sequence[str], order: Mapping[str, object]) -> "Namespaces":
        """Make namespaces of these kinds with a first process that follows `order`. AssertionError where that fails."""
        command = ["unshare", *(f"--{kind}" for kind in kinds), "--pid", "--mount-proc", "--fork", "--kill-child"]
        command += [sys.executable, "-I", "-S", str(INIT), json.dumps(order)]
        pipe = subprocess.PIPE
        keeper = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert keeper.stdout is not None
        assert keeper.stderr is not None
        assert keeper.stdout.readline() == "ready\n", f"the first process of a host has ended: {keeper.stderr.read()}"
        (first,) = psutil.Process(keeper.pid).children()
        return cls(keeper=keeper, first=first.pid)

    def enter(self, command: Sequence[str | Path], folder: Path = Path("/")) -> list[str]:
        """The command, run within the namespaces, in a folder there."""
        return ["nsenter", "--target", str(self.first), "--all", f"--wdns={folder}", "--", *map(str, command)]

    def processes(self) -> list[psutil.Process]:
        """All processes within, without the first one and without those that have ended but for their parent's look."""
        found: list[psutil.Process] = []
        if self.keeper.poll() is not None:
            return found
        own = os.stat(f"/proc/{self.first}/ns/pid").st_ino
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                is_own = os.stat(f"/proc/{process.pid}/ns/pid").st_ino == own
                if is_own and process.pid != self.first and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def end(self) -> None:
        """End all processes within, and with the last one the namespaces."""
        processes = [psutil.Process(self.first), *self.processes()] if self.keeper.poll() is None else []
        for process in processes[:1]:
            process.kill()
        self.keeper.wait()
        psutil.wait_procs(processes, END_S)
        for stream in (self.keeper.stdin, self.keeper.stdout, self.keeper.stderr):
            assert stream is not None
            stream.close()


@define(kw_only=True, eq=False)
class Host:
    """One machine of the data centre."""

    number: int
    shared: Path
    """The shared folder, under the same path on every host and outside."""
    folder: Path
    """The sources of its own /etc/hosts and /etc/resolv.conf."""
    namespaces: Namespaces = field(init=False)

    @property
    def name(self) -> str:
        """Its hostname."""
        return f"host-{self.number}"

    @property
    def address(self) -> str:
        """Its IPv4 address."""
        return f"{NETWORK}.{self.number}"

    def start(self) -> None:
        """Make its namespaces."""
        stage = self.folder / "stage"
        stage.mkdir(parents=True, exist_ok=True)
        files = {"/etc/hosts": "hosts", "/etc/resolv.conf": "resolv.conf"}
        for name in files.values():
            (self.folder / name).touch()
        kept = sorted({path for path in (ROOT, Path(sys.prefix), self.shared, self.folder) if path.is_relative_to("/tmp")})
        outer = [path for path in kept if not any(path != other and path.is_relative_to(other) for other in kept)]
        order = {
            "name": self.name,
            "stage": str(stage),
            "shared": list(map(str, outer)),
            "files": {place: str(self.folder / name) for place, name in files.items()},
        }
        self.namespaces = Namespaces.make(("net", "mount", "uts", "ipc"), order)

    def popen(
        self, command: Sequence[str | Path], output: IO[bytes] | int = subprocess.DEVNULL, **variables: str
    ) -> subprocess.Popen[bytes]:
        """Start a command on the host, in the shared folder. What it says goes to `output`."""
        return subprocess.Popen(
            self.namespaces.enter(command, self.shared),
            env=self.environment(variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run(self, command: Sequence[str | Path], **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command on the host, and return how it ended."""
        return subprocess.run(
            self.namespaces.enter(command, self.shared),
            env=self.environment(variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_S,
        )

    def check(self, command: Sequence[str | Path], **variables: str) -> str:
        """Run a command on the host, which has to succeed, and return its output."""
        result = self.run(command, **variables)
        assert result.returncode == 0, f"{command} on {self.name}: {result.stdout}{result.stderr}"
        return result.stdout

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """The variables of a user on the host."""
        programs = Path(sys.executable).parent
        passed = {name: os.environ[name] for name in PASSED if name in os.environ}
        return {
            "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
            "HOME": "/tmp/home",
            "HF_HUB_OFFLINE": "1",
            "NO_COLOR": "1",
            "OMP_NUM_THREADS": "1",
            **passed,
            **variables,
        }

    def signal(self, process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        """Send a signal to a process that `popen` has started: nsenter, which waits for it outside, hands none on."""
        for inner in psutil.Process(process.pid).children():
            inner.send_signal(number)

    def processes(self, mark: str = "") -> list[psutil.Process]:
        """The processes of the host whose command line has `mark`."""
        found = []
        for process in self.namespaces.processes():
            with suppress(psutil.Error):
                if mark in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def end_processes(self) -> None:
        """End all that runs on the host, which stays."""
        while processes := self.namespaces.processes():
            for process in processes:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(processes, 1.0)

    def await_process(self, mark: str) -> psutil.Process:
        """Wait until the host has a process whose command line has `mark`."""
        deadline = time.monotonic() + RUN_S
        while not (found := self.processes(mark)):
            assert time.monotonic() < deadline, f"no {mark} on {self.name}"
            time.sleep(0.1)
        return found[0]


@define(kw_only=True, eq=False)
class DataCentre:
    """Hosts, numbered from 1, and the router between them."""

    shared: Path
    hosts: Mapping[int, Host]
    router: Namespaces
    network: Network

    def write_names(self, *, server: str | None = None, own: str | None = None) -> None:
        """Have every host know the others by name, or ask a name server, which knows them. `own` is the address of each host's
        own name, such as the loopback address that Debian's installer writes."""
        for host in self.hosts.values():
            named = [f"{own} {host.name}"] if own else []
            named += [f"{other.address} {other.name}" for other in self.hosts.values() if other is not host or not own]
            lines = ["127.0.0.1 localhost", *([] if server else named)]
            (host.folder / "hosts").write_text("".join(f"{line}\n" for line in lines))
            (host.folder / "resolv.conf").write_text(f"nameserver {server}\noptions timeout:30\n" if server else "")

    @contextmanager
    def slow_names(self, seconds: float) -> Iterator[None]:
        """Have a name server answer all questions for hosts, each so late, until the block ends."""
        names = [f"{host.name}={host.address}" for host in self.hosts.values()]
        with self.network.program(NAMES, ROUTER, str(seconds), *names):
            self.write_names(server=ROUTER)
            try:
                yield
            finally:
                self.write_names()

    def revive(self, number: int) -> Host:
        """Start a host that is gone, under its name and address."""
        host = self.hosts[number]
        host.namespaces.end()
        host.start()
        self.network.join(number, host.namespaces.first)
        host.check(["mkdir", "-p", "/tmp/home"])
        return host

    def add_public_networks(self) -> None:
        """Give each host a second interface, by which it would reach the internet and no other host reaches it."""
        for host in self.hosts.values():
            host.check(["ip", "link", "add", "public", "type", "veth", "peer", "name", "internet"])
            host.check(["ip", "address", "add", f"{PUBLIC}.{host.number}/24", "dev", "public"])
            for device in ("public", "internet"):
                host.check(["ip", "link", "set", device, "up"])
            host.check(["ip", "route", "add", f"{NETWORK}.0/24", "via", ROUTER])
            host.check(["ip", "route", "replace", "default", "dev", "public"])

    def put_right(self) -> None:
        """End everything on all hosts, and start those that are gone."""
        for number, host in self.hosts.items():
            if host.namespaces.keeper.poll() is None:
                host.end_processes()
            else:
                self.revive(number)

    def namespaces(self) -> list[Namespaces]:
        """Network namespaces of the router and of the hosts."""
        return [self.router, *(host.namespaces for host in self.hosts.values())]

    def processes(self) -> list[Any]:
        """The processes of all hosts."""
        return [process for host in self.hosts.values() for process in host.processes()]


@contextmanager
def data_centre(folder: Path, shared: Path, num_hosts: int) -> Iterator[DataCentre]:
    """Hosts that see `shared` under its own path. `folder` has what else they need."""
    router = Namespaces.make(("net",), {})
    hosts = {number: Host(number=number, shared=shared, folder=folder / f"host-{number}") for number in range(1, num_hosts + 1)}
    started: list[Host] = []
    try:
        network = Network(router=router.first, address=ROUTER, prefix=NETWORK)
        network.set_up()
        centre = DataCentre(shared=shared, hosts=hosts, router=router, network=network)
        for number, host in hosts.items():
            host.start()
            started.append(host)
            network.join(number, host.namespaces.first)
            host.check(["mkdir", "-p", "/tmp/home"])
        centre.write_names()
        yield centre
    finally:
        for host in started:
            host.namespaces.end()
        router.end()
