"""Weights from trainers on two hosts reach engines on both: the metrics are those of one process.

The engines are on devices of their own (`placement = "separate"`), each on the host of one trainer rank.
"""

import re
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from rlcore_torchkit.testing.models import make_model

from ..system.system_support import DIGITS
from .hosts import DataCentre
from .ray_cluster import Listener, open_beyond, start_ray
from .runs import SMALL, assert_nothing_is_left, assert_same_metrics, started, trained

pytestmark = [pytest.mark.wide, pytest.mark.timeout(1500)]
ENGINES = ("generator.name=vllm", "generator.vllm.cpu_kv_cache_gib=0.1", "model.path=wide")
LONGER = (*SMALL, "run.num_steps=12")
SEPARATE = (
    *("cluster.nodes=2", "cluster.gpus_per_node=2", "cluster.placement=separate", "cluster.generator_gpus_per_node=1"),
    *("cluster.address=auto", "cluster.wait_s=20"),
)


@pytest.fixture(scope="module")
def in_one_process(centre: DataCentre) -> Path:
    """The same training in one process on a host."""
    # The engine's attention on CPU takes heads of at least 32.
    make_model(centre.shared / "wide", "qwen3", alphabet=DIGITS, hidden_size=64, num_heads=2, max_length=64)
    return trained(centre.hosts[1], "one-process", *SMALL, *ENGINES)


@pytest.fixture(scope="module")
def longer(in_one_process: Path, centre: DataCentre) -> Path:
    """The same with more steps."""
    return trained(centre.hosts[1], "longer", *LONGER, *ENGINES)


@pytest.mark.parametrize("channel", ["shards", "directory"])
def test_engines_of_both_hosts_have_the_trainers_weights(with_ray: DataCentre, in_one_process: Path, channel: str) -> None:
    arguments = (channel, *SMALL, *ENGINES, *SEPARATE, f"refit.channel={channel}")
    beyond: list[Listener] = []
    with started(with_ray.hosts[1], *arguments) as under_way:
        for step in (0, 1):
            under_way.await_step(step)
            beyond += [each for host in with_ray.hosts.values() for each in open_beyond(host)]
        assert under_way.end() == 0, under_way.said()
    run = under_way.directory
    assert beyond == []
    assert_same_metrics(run, in_one_process)
    logs = {rank: (run / "logs" / f"rank-{rank}.log").read_text() for rank in range(2)}
    nodes = {re.search(r"node (\S+),", log)[1] for log in logs.values()}  # type: ignore[index]
    assert nodes == {host.address for host in with_ray.hosts.values()}
    assert {log.parent.name for log in (run / "logs").glob("**/vllm-*")} == {"rank-0", "rank-1"}
    assert_nothing_is_left(with_ray)


@pytest.mark.parametrize(("hold_s", "exit_code"), [(5.0, 0), (None, 12)], ids=["for 5 s", "for good"])
def test_trainers_and_engines_are_parted(with_ray: DataCentre, longer: Path, hold_s: float | None, exit_code: int) -> None:
    """Each engine then has the weights of the trainer's rank on its own host alone, and no refit is complete."""
    name = f"parted-{exit_code}"
    arguments = (name, *LONGER, *ENGINES, *SEPARATE, "refit.channel=shards")
    limits = ("cluster.straggler_timeout_s=60", "cluster.call_timeout_s=120", "generator.vllm.refit_timeout_s=60")
    with started(with_ray.hosts[1], *arguments, *limits) as run:
        run.await_step(2)
        with with_ray.network.partition([1], [2]):
            if hold_s is not None:
                with suppress(subprocess.TimeoutExpired):
                    run.process.wait(hold_s)
            else:
                run.end()
        assert run.end() == exit_code, run.said()
    assert_nothing_is_left(with_ray)
    if exit_code:
        with_ray.put_right()
        start_ray(with_ray)
        trained(with_ray.hosts[1], *arguments, "--resume")
    assert_same_metrics(run.directory, longer)


def test_weights_keep_to_the_clusters_network(with_ray: DataCentre, in_one_process: Path) -> None:
    """Hosts whose default route is another network's, which the other hosts do not reach."""
    with_ray.put_right()
    with_ray.add_public_networks()
    start_ray(with_ray, by_address=True)
    run = trained(with_ray.hosts[1], "networks", *SMALL, *ENGINES, *SEPARATE, "refit.channel=shards")
    assert_same_metrics(run, in_one_process)
