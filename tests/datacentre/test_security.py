"""A cluster over hosts listens on its own addresses and the loopback interface alone, and lets in nobody without its token."""

from pathlib import Path

import pytest

from .hosts import DataCentre
from .ray_cluster import listening
from .runs import SMALL, TWO_HOSTS, started

pytestmark = pytest.mark.wide


def test_nothing_listens_beyond_the_clusters_addresses(with_ray: DataCentre, alone: Path) -> None:
    hosts = with_ray.hosts.values()
    before = {host.name: listening(host) for host in hosts}
    found: set[tuple[str, str, int]] = set()
    with started(with_ray.hosts[1], "listens", *SMALL, *TWO_HOSTS, "run.num_steps=6") as run:
        for step in range(1, 6):
            run.await_step(step)
            found |= {(host.name, *place) for host in hosts for place in listening(host) - before[host.name]}
        assert run.end() == 0
    print(before)
    print(found)
    assert found
    own = {host.name: host.address for host in hosts}
    assert [place for place in found if place[1] != own[place[0]] and not place[1].startswith(("127.", "::1"))] == []
