"""A Slurm job by docs/launch/slurm.sbatch trains on two hosts as one process does, and goes on where its allocation ended."""

import re
import sys
import time
from pathlib import Path

import pytest

from ..system.run_processes import last_step
from ..system.system_support import Workplace
from .hosts import ROOT, DataCentre
from .runs import SMALL, assert_nothing_is_left, assert_same_metrics
from .slurm import command, logs, start_slurm, unavailable

pytestmark = [pytest.mark.wide, pytest.mark.timeout(1800)]
SBATCH = ROOT / "docs" / "launch" / "slurm.sbatch"
STEPS = (*SMALL, "run.num_steps=8")
ENDINGS = {"before its time limit": ("scancel", "--batch", "--signal=USR1"), "at once": ("scontrol", "requeue")}
"""Commands that end a job's allocation."""
JOB_S = 600.0
"""Most seconds for a job to come to a state."""


@pytest.fixture(scope="module")
def slurm(centre: DataCentre, shared: Path) -> DataCentre:
    """Two hosts of one Slurm cluster, whose users have no token of Ray's."""
    if reason := unavailable():
        pytest.skip(reason)
    start_slurm(centre, shared)
    return centre


@pytest.fixture(scope="module")
def whole(shared: Path) -> Path:
    """The training of one process."""
    return Workplace(shared).train(str(shared / "grpo.toml"), *STEPS, "run.name=whole", f"run.directory={shared / 'runs'}")


def submit(slurm: DataCentre) -> str:
    """Queue the script as it is, on hosts without GPUs; returns the job's number."""
    environment = Path(sys.prefix)
    words = ("sbatch", "--parsable", "--nodes=2", "--gpus-per-node=0", SBATCH, environment, "grpo.toml", *STEPS)
    return command(slurm.hosts[1], slurm.shared, *words).strip()


def state(slurm: DataCentre, job: str) -> dict[str, str]:
    """Return Slurm's record of a job."""
    return dict(re.findall(r"(\S+?)=(\S*)", command(slurm.hosts[1], slurm.shared, "scontrol", "show", "job", job)))


def await_state(slurm: DataCentre, job: str, *states: str) -> None:
    """Wait until a job is in one of these states, and let one that was queued again start at once."""
    deadline = time.monotonic() + JOB_S
    while (found := state(slurm, job))["JobState"] not in states:
        output = slurm.shared / f"rlcore-{job}.log"
        said = output.read_text() if output.exists() else ""
        assert found["JobState"] in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"), f"{found}: {said}"
        assert time.monotonic() < deadline, f"{found}: {said}{logs(slurm)}"
        if found["JobState"] == "PENDING" and found["Reason"] == "BeginTime":
            command(slurm.hosts[1], slurm.shared, "scontrol", "update", f"jobid={job}", "starttime=now")
        time.sleep(1.0)


@pytest.mark.parametrize("ending", ["none", *ENDINGS])
def test_a_job_trains_as_one_process_does(slurm: DataCentre, whole: Path, ending: str) -> None:
    """USR1, as before the time limit, has the run save and queues the job again; `scontrol requeue` ends the job at once."""
    job = submit(slurm)
    run = slurm.shared / "runs" / f"rlcore-{job}"
    if ending != "none":
        deadline = time.monotonic() + JOB_S
        while last_step(run) < 2:
            assert time.monotonic() < deadline, (state(slurm, job), logs(slurm))
            time.sleep(0.1)
        words = (
            ("scancel", "--batch", "--signal=USR1", job) if ending == "before its time limit" else ("scontrol", "requeue", job)
        )
        command(slurm.hosts[1], slurm.shared, *words)
    await_state(slurm, job, "COMPLETED")
    assert state(slurm, job)["Restarts"] == ("0" if ending == "none" else "1")
    assert_nothing_is_left(slurm)
    assert_same_metrics(run, whole)
