"""Hosts that do not fit together: one clear message each, before a step is taken."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..system.chaos_faults import CLOCK, CLOCK_MODULE
from .hosts import DataCentre
from .ray_cluster import TOKEN, await_joined, give_token, start_head, start_node, start_ray
from .runs import SMALL, TWO_HOSTS, assert_same_metrics, failure, started, trained

pytestmark = pytest.mark.wide
ENTRY_POINTS = "[rlcore.trainers]\nfsdp2 = rlcore_fsdp2.provider:FSDP2\n"


@pytest.fixture
def hosts(centre: DataCentre) -> Iterator[DataCentre]:
    """Two hosts on which nothing runs yet."""
    yield centre
    for host in centre.hosts.values():
        host.end_processes()


def other_plugin(folder: Path) -> str:
    """A folder in which another version of a plugin is installed; returns the value of PYTHONPATH."""
    information = folder / "site" / "rlcore_fsdp2-9.9.9.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: rlcore-fsdp2\nVersion: 9.9.9\n")
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    return str(information.parent)


def test_another_version_of_a_plugin_is_refused_with_its_host(hosts: DataCentre) -> None:
    one, other = hosts.hosts.values()
    start_head_and_node(hosts, PYTHONPATH=other_plugin(hosts.shared))
    said = failure(one, "plugin", 3, *SMALL, *TWO_HOSTS)
    assert f"node(s) {other.address}: " in said
    assert "9.9.9" in said


def start_head_and_node(centre: DataCentre, **variables: str) -> None:
    """A cluster whose second host has further variables."""
    one, other = centre.hosts.values()
    for host in (one, other):
        give_token(host)
    start_head(one)
    await_joined(start_node(other, one, **variables))


def test_a_host_without_the_shared_folder_is_named(hosts: DataCentre) -> None:
    one, other = hosts.hosts.values()
    runs = hosts.shared / "runs"
    runs.mkdir(exist_ok=True)
    other.check(["mount", "-t", "tmpfs", "tmpfs", str(runs)])
    try:
        start_ray(hosts)
        said = failure(one, "apart", 2, *SMALL, *TWO_HOSTS)
    finally:
        other.end_processes()
        other.check(["umount", "--lazy", str(runs)])
    assert f"node(s) {other.address}" in said
    assert "run.directory" in said


def test_an_address_that_does_not_resolve_is_named(hosts: DataCentre) -> None:
    said = failure(hosts.hosts[1], "nowhere", 2, *SMALL, *TWO_HOSTS, "cluster.address=nowhere:6379")
    assert 'cluster.address: found "nowhere:6379"' in said


def test_a_driver_without_the_token_is_refused(hosts: DataCentre) -> None:
    one, other = hosts.hosts.values()
    give_token(one)
    start_head(one)
    other.check(["rm", "-rf", "/tmp/home/.ray"])
    for token in (None, "f" * len(TOKEN)):
        if token is not None:
            give_token(other, token)
        said = failure(other, "token", 2, *SMALL, "cluster.gpus_per_node=1", "cluster.address=host-1:6379")
        assert 'cluster.address: found "host-1:6379"' in said
        assert "AuthenticationError" in said


@pytest.mark.parametrize("token", [None, "f" * len(TOKEN)])
def test_a_host_without_the_token_does_not_join(hosts: DataCentre, token: str | None) -> None:
    one, other = hosts.hosts.values()
    give_token(one)
    start_head(one)
    other.check(["rm", "-rf", "/tmp/home/.ray"])
    if token is not None:
        give_token(other, token)
    log = start_node(other, one)
    said = failure(one, "refused", 2, *SMALL, *TWO_HOSTS, "cluster.wait_s=5")
    assert f"node {one.address} with" in said
    assert f"node {other.address} with" not in said
    assert re.search("AuthenticationError|auth_token|[Tt]oken", log.read_text())


def test_two_drivers_of_one_run_over_hosts(hosts: DataCentre) -> None:
    one, other = hosts.hosts.values()
    start_ray(hosts)
    with started(one, "twice", *SMALL, *TWO_HOSTS, "run.num_steps=200") as run:
        run.await_step(1)
        said = failure(other, "twice", 6, *SMALL, "--resume")
    assert re.search(r"in use by a run of another process \(process \d+ on host-1\)", said)


def test_another_recipe_does_not_take_over_a_run(hosts: DataCentre) -> None:
    """Metrics of the run in one process, on another host."""
    one, other = hosts.hosts.values()
    trained(one, "recipe", *SMALL)
    said = failure(other, "recipe", 6, *SMALL, "algorithm.name=sft", "--resume")
    assert "algorithm" in said


def test_clocks_far_apart_are_noted_and_change_no_metric(hosts: DataCentre, alone: Path) -> None:
    one, other = hosts.hosts.values()
    site = hosts.shared / "clock"
    site.mkdir()
    (site / "sitecustomize.py").write_text(CLOCK_MODULE)
    (site / "seconds").write_text("600")
    start_head_and_node(hosts, **{"PYTHONPATH": str(site), CLOCK: str(site / "seconds")})
    with started(one, "clocks", *SMALL, *TWO_HOSTS) as run:
        assert run.end() == 0, run.said()
    assert re.search(rf"node {other.address} is (59\d|60\d) s ahead", run.said())
    assert_same_metrics(run.directory, alone)
