"""Weights from trainers on two hosts reach engines on both: the metrics are those of one process.

The engines are on devices of their own (`placement = "separate"`), each on the host of one trainer rank.
"""

import re
from pathlib import Path

import pytest

from rlcore_torchkit.testing.models import make_model

from ..system.system_support import DIGITS
from .hosts import DataCentre
from .runs import SMALL, assert_nothing_is_left, assert_same_metrics, trained

pytestmark = [pytest.mark.wide, pytest.mark.timeout(1500)]
ENGINES = ("generator.name=vllm", "generator.vllm.cpu_kv_cache_gib=0.1", "model.path=wide")
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


@pytest.mark.parametrize("channel", ["shards", "directory"])
def test_engines_of_both_hosts_have_the_trainers_weights(with_ray: DataCentre, in_one_process: Path, channel: str) -> None:
    run = trained(with_ray.hosts[1], channel, *SMALL, *ENGINES, *SEPARATE, f"refit.channel={channel}")
    assert_same_metrics(run, in_one_process)
    logs = {rank: (run / "logs" / f"rank-{rank}.log").read_text() for rank in range(2)}
    nodes = {re.search(r"node (\S+),", log)[1] for log in logs.values()}  # type: ignore[index]
    assert nodes == {host.address for host in with_ray.hosts.values()}
    assert {log.parent.name for log in (run / "logs").glob("**/vllm-*")} == {"rank-0", "rank-1"}
    assert_nothing_is_left(with_ray)
