"""Faults of networks and hosts: a run ends with the metrics of one process, or names the cause and resumes to them."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from attrs import frozen

from rlcore_torchkit.testing.models import make_model

from ..system.chaos_faults import mount, unmount
from ..system.system_support import DIGITS, Workplace
from .hosts import DataCentre
from .ray_cluster import start_ray
from .runs import SMALL, TWO_HOSTS, assert_nothing_is_left, assert_same_metrics, started, trained

pytestmark = [pytest.mark.wide, pytest.mark.timeout(1500)]
STEPS = (*SMALL, "run.num_steps=8")
LIMITS = ("cluster.straggler_timeout_s=60", "cluster.call_timeout_s=120")
STRUCK_AFTER = 2
"""The last step that every run takes before its fault."""


@frozen(kw_only=True)
class Fault:
    """An event in a run over two hosts, with the driver on host 1 unless `driver` says another."""

    strike: Callable[[DataCentre, ExitStack], object]
    """Begins the fault; what ends it is put on the stack."""
    hold_s: float | None = None
    """Seconds until it ends; None where it lasts until the run has ended."""
    exit_code: int = 0
    """The run's; 0 where it goes on by itself."""
    cause: str = ""
    """A part of the run's error."""
    driver: int = 1


def fill_folder(centre: DataCentre, stack: ExitStack) -> None:
    """Leave no byte in the shared folder, whose file system is small."""
    ballast = centre.shared / "ballast"
    stack.callback(ballast.unlink)
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(2**16))


def end_head(centre: DataCentre, _: ExitStack) -> None:
    """Kill the processes of Ray on the head's host."""
    for mark in ("ray start", "gcs_server", "raylet/raylet"):
        for process in centre.hosts[1].processes(mark):
            with suppress(ProcessLookupError):
                process.kill()


FAULTS = {
    "delay of 50 ms": Fault(strike=lambda centre, stack: stack.enter_context(centre.network.delay([1, 2], 0.05))),
    "loss of 1%": Fault(strike=lambda centre, stack: stack.enter_context(centre.network.loss(2, 1))),
    "rate of 1 Mbit per s": Fault(strike=lambda centre, stack: stack.enter_context(centre.network.rate(2, 1_000_000))),
    "cut for 5 s": Fault(strike=lambda centre, stack: stack.enter_context(centre.network.cut(2)), hold_s=5.0),
    "cut for good": Fault(
        strike=lambda centre, stack: stack.enter_context(centre.network.cut(2)),
        exit_code=12,
        cause="its node has left the cluster",
    ),
    "host gone": Fault(
        strike=lambda centre, _: centre.hosts[2].namespaces.end(), exit_code=12, cause="its node has left the cluster"
    ),
    "head ended": Fault(strike=end_head, exit_code=1, cause="start the run again, with --resume"),
    "head ended, driver elsewhere": Fault(strike=end_head, exit_code=1, cause="start the run again, with --resume", driver=2),
    "full folder": Fault(strike=fill_folder, exit_code=11, cause=os.strerror(28)),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A shared folder on a small file system of its own."""
    folder = tmp_path_factory.mktemp("small")
    assert mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder))
    Workplace.make(folder, make_model(folder / "model", "qwen3", alphabet=DIGITS, max_length=64))
    yield folder
    unmount(folder)


@pytest.fixture(scope="module")
def whole(shared: Path) -> Path:
    """The training of one process."""
    return Workplace(shared).train(str(shared / "grpo.toml"), *STEPS, "run.name=whole", f"run.directory={shared / 'runs'}")


@pytest.fixture
def cluster(centre: DataCentre) -> Iterator[DataCentre]:
    """Two hosts with a Ray cluster of their own."""
    start_ray(centre)
    yield centre
    centre.put_right()


def test_a_name_server_may_take_its_time(cluster: DataCentre, whole: Path) -> None:
    with cluster.slow_names(3.0):
        run = trained(cluster.hosts[2], "slow-names", *STEPS, *TWO_HOSTS, "cluster.address=host-1:6379")
    assert_nothing_is_left(cluster)
    assert_same_metrics(run, whole)


@pytest.mark.parametrize("name", FAULTS)
def test_a_run_goes_on_or_names_the_cause_and_resumes(cluster: DataCentre, whole: Path, name: str) -> None:
    fault = FAULTS[name]
    driver = cluster.hosts[fault.driver]
    with ExitStack() as stack, started(driver, name, *STEPS, *TWO_HOSTS, *LIMITS) as run:
        run.await_step(STRUCK_AFTER)
        fault.strike(cluster, stack)
        if fault.hold_s is not None:
            with suppress(subprocess.TimeoutExpired):
                run.process.wait(fault.hold_s)
            stack.close()
        code = run.end()
    assert (code, fault.cause in run.said()) == (fault.exit_code, True), run.said()
    assert_nothing_is_left(cluster)
    if code:
        cluster.put_right()
        start_ray(cluster)
        trained(driver, name, *STEPS, *TWO_HOSTS, "--resume")
    assert_same_metrics(run.directory, whole)
