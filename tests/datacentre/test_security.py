"""Processes of a run over hosts listen on the cluster's addresses and the loopback interface, but for Ray's own sockets."""

from collections import Counter

import pytest

from .hosts import DataCentre
from .ray_cluster import Listener, listening
from .runs import SMALL, TWO_HOSTS, started

pytestmark = pytest.mark.wide
OF_RAY = {"gcs_server", "raylet", "python", "python3"}
"""Processes of Ray alone, which listen on every interface. Each process that calls Ray has one such socket besides."""


def test_nothing_of_a_run_listens_beyond_the_clusters_addresses(with_ray: DataCentre) -> None:
    found: set[tuple[str, Listener]] = set()
    with started(with_ray.hosts[1], "listens", *SMALL, *TWO_HOSTS, "run.num_steps=5") as run:
        for step in range(1, 5):
            run.await_step(step)
            found |= {(host.address, listener) for host in with_ray.hosts.values() for listener in listening(host)}
        assert run.end() == 0, run.said()
    of_runs = [(host, listener) for host, listener in found if listener.process not in OF_RAY]
    of_ranks = {host for host, listener in of_runs if listener.process.startswith("ray::Worker") and listener.address == host}
    assert of_ranks == {host.address for host in with_ray.hosts.values()}, "both ranks listen for each other"
    beyond = [(host, each) for host, each in of_runs if each.address not in (host, "*") and not each.address.startswith("127.")]
    assert beyond == []
    everywhere = Counter((host, each.pid, each.process) for host, each in of_runs if each.address == "*")
    assert set(everywhere.values()) == {1}, everywhere
