"""Training over two hosts has the metrics of one process, also where it resumes from checkpoints on the shared folder."""

from pathlib import Path

import pytest

from .hosts import DataCentre
from .runs import SMALL, TWO_HOSTS, assert_nothing_is_left, assert_same_metrics, trained

pytestmark = pytest.mark.wide
MEGATRON = ("trainer.name=megatron",)


@pytest.mark.parametrize(
    ("name", "driver", "options"),
    [
        ("fsdp2", 1, ()),
        ("fsdp2-from-the-second", 2, ("cluster.address=host-1:6379",)),
        ("megatron", 1, MEGATRON),
        ("megatron-stages", 1, (*MEGATRON, "trainer.megatron.pipeline_parallel=2")),
    ],
)
def test_two_hosts_train_as_one_process(
    with_ray: DataCentre, alone: Path, name: str, driver: int, options: tuple[str, ...]
) -> None:
    run = trained(with_ray.hosts[driver], name, *SMALL, *TWO_HOSTS, *options)
    assert_same_metrics(run, alone)
    assert_nothing_is_left(with_ray)


def test_hostnames_may_be_loopback_addresses(with_ray: DataCentre, alone: Path) -> None:
    """Debian's installer writes 127.0.1.1 beside a machine's own name, by which gloo looks for an address."""
    with_ray.write_names(own="127.0.1.1")
    try:
        run = trained(with_ray.hosts[1], "loopback", *SMALL, *TWO_HOSTS)
    finally:
        with_ray.write_names()
    assert_same_metrics(run, alone)


def test_a_run_resumes_on_fewer_hosts_and_on_more(with_ray: DataCentre) -> None:
    """Each host reads what others have written into the shared folder."""
    one, other = with_ray.hosts.values()
    steps = (*SMALL, "evaluation.at_end=false")
    trained(one, "moved", *steps, *TWO_HOSTS, "run.num_steps=1")
    trained(other, "moved", *steps, "run.num_steps=2", "--resume")
    run = trained(other, "moved", *steps, *TWO_HOSTS, "cluster.address=host-1:6379", "run.num_steps=3", "--resume")
    assert_same_metrics(run, trained(one, "steady", *steps, "run.num_steps=3"))
