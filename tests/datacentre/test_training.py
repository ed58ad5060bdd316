"""Training over two hosts has the metrics of one process, also where it resumes from checkpoints on the shared folder."""

from pathlib import Path

import pytest

from .hosts import DataCentre
from .runs import SMALL, TWO_HOSTS, assert_nothing_is_left, assert_same_metrics, trained

pytestmark = pytest.mark.wide


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fsdp2", ()),
        ("driver on the second", ("cluster.address=host-1:6379",)),
    ],
)
def test_two_hosts_train_as_one_process(with_ray: DataCentre, alone: Path, name: str, options: tuple[str, ...]) -> None:
    host = with_ray.hosts[2 if name == "driver on the second" else 1]
    run = trained(host, name, *SMALL, *TWO_HOSTS, *options)
    assert_same_metrics(run, alone)
    assert_nothing_is_left(with_ray)
