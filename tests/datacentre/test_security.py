"""Processes of a run over hosts listen on the cluster's addresses and the loopback interface, but for Ray's own sockets."""

import pytest

from .hosts import DataCentre
from .ray_cluster import Listener, listening, open_beyond
from .runs import SMALL, TWO_HOSTS, started

pytestmark = pytest.mark.wide


def test_nothing_of_a_run_listens_beyond_the_clusters_addresses(with_ray: DataCentre) -> None:
    beyond: list[Listener] = []
    hosts_of_ranks: set[str] = set()
    with started(with_ray.hosts[1], "listens", *SMALL, *TWO_HOSTS, "run.num_steps=5") as run:
        for step in range(1, 5):
            run.await_step(step)
            for host in with_ray.hosts.values():
                beyond += open_beyond(host)
                found = [each for each in listening(host) if each.command.startswith("ray::Worker")]
                hosts_of_ranks |= {each.address for each in found if each.address == host.address}
        assert run.end() == 0, run.said()
    assert hosts_of_ranks == {host.address for host in with_ray.hosts.values()}, "both ranks listen for each other"
    assert beyond == []
