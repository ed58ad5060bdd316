"""A Slurm cluster over the hosts of a data centre: munge and slurmd on each, slurmctld on the first."""

import shutil
import subprocess
import time
from pathlib import Path

from .hosts import DataCentre, Host

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "munged")
READY_S = 120.0
"""Most seconds for all hosts to be idle."""
CONFIGURATION = """
ClusterName=datacentre
SlurmctldHost=host-1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation=/tmp/slurmctld
SlurmdSpoolDir=/tmp/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/tmp/slurmctld.log
SlurmdLogFile=/tmp/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={nodes} CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def unavailable() -> str | None:
    """Return why no Slurm starts here; None where it does."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"missing: {', '.join(missing)}. Run: apt-get install slurm-wlm" if missing else None


def start_slurm(centre: DataCentre, folder: Path) -> None:
    """Start Slurm on all hosts, and wait until each is idle. `folder` has its configuration, seen by all hosts."""
    names = [host.name for host in centre.hosts.values()]
    (folder / "slurm.conf").write_text(CONFIGURATION.format(nodes=",".join(names)))
    (folder / "munge.key").write_bytes(bytes(range(128)))
    (folder / "munge.key").chmod(0o400)
    for host in centre.hosts.values():
        host.check(["mkdir", "-p", "/run/munge", "/tmp/slurmctld", "/tmp/slurmd"])
        host.check(["munged", "--force", f"--key-file={folder / 'munge.key'}", *_munge_files()])
    first = centre.hosts[1]
    start(first, "slurmctld", folder)
    for host in centre.hosts.values():
        start(host, "slurmd", folder, "-N", host.name)
    deadline = time.monotonic() + READY_S
    while (states := command(first, folder, "sinfo", "--noheader", "--Node", "--format=%T").split()) != ["idle"] * len(names):
        assert time.monotonic() < deadline, f"{states}: {logs(centre)}"
        time.sleep(0.5)


def start(host: Host, program: str, folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a daemon of Slurm on a host."""
    return host.popen([program, "-D", "-f", folder / "slurm.conf", *arguments])


def command(host: Host, folder: Path, *words: str | Path) -> str:
    """Return what a command of Slurm prints on a host, where it has to succeed."""
    return host.check(words, SLURM_CONF=str(folder / "slurm.conf"))


def logs(centre: DataCentre) -> str:
    """Return the last lines of Slurm's daemons."""
    return "".join(host.run(["sh", "-c", "tail -n 20 /tmp/slurm*.log"]).stdout for host in centre.hosts.values())


def _munge_files() -> list[str]:
    return [
        "--socket=/run/munge/munge.socket.2",
        "--pid-file=/run/munge/pid",
        "--log-file=/tmp/munge.log",
        "--seed-file=/tmp/munge.seed",
    ]
