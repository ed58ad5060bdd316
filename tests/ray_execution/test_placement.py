"""Places for the ranks: what the cluster does not have, or others use, is said before anything is allocated."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.report.progress import Progress
from rlcore.run.train import train
from rlcore.spi import ConfigError, PluginError, WorkerError
from rlcore.testing.fakes import FakeTokenizer
from rlcore_ray import calls
from rlcore_ray.config import RayConfig
from rlcore_ray.failures import RemoteError, Reply, WorkerInfo

from .conftest import Notes  # type: ignore[import-not-found]

Prepare = Callable[..., RunPlan]
pytestmark = pytest.mark.usefixtures("local_ray")


def start(prepared: RunPlan) -> None:
    train(prepared, resume=False, progress=Progress(), tokenizer=FakeTokenizer())


def test_more_than_the_cluster_has_is_said_at_once(prepared: Prepare) -> None:
    with pytest.raises(ConfigError) as raised:
        start(prepared("cluster.gpus_per_node=1000"))
    (problem,) = raised.value.problems
    assert (problem.path, problem.found) == ("cluster.gpus_per_node", "1 node(s) with 1000 CPUs each")
    assert problem.expected.endswith(": node 127.0.0.1 with 4 CPUs")
    with pytest.raises(ConfigError) as raised:
        start(prepared("cluster.nodes=2", "cluster.address=auto", "cluster.wait_s=1", "run.name=two"))
    (problem,) = raised.value.problems
    assert (problem.path, problem.found) == ("cluster.nodes", "2 node(s) with 1 CPU each")
    assert "also after 1 s" in problem.expected


def test_a_run_begins_on_the_nodes_that_are_there_where_the_recipe_allows_it(prepared: Prepare) -> None:
    notes = Notes()
    whole = ("cluster.nodes=3", "cluster.gpus_per_node=2", "cluster.address=auto", "run.name=small")
    train(prepared(*whole, "cluster.min_nodes=1"), resume=False, progress=notes, tokenizer=FakeTokenizer())
    assert len([text for text in notes.texts if "with 1 of 3 nodes" in text]) == 1
    with pytest.raises(ConfigError) as raised:
        start(prepared(*whole, "cluster.min_nodes=2", "run.name=none"))
    (problem,) = raised.value.problems
    assert (problem.path, problem.found) == ("cluster.nodes", "2 node(s) with 2 CPUs each")


def test_no_more_nodes_are_needed_than_are_used(prepared: Prepare) -> None:
    with pytest.raises(ConfigError) as raised:
        prepared("cluster.nodes=2", "cluster.address=auto", "cluster.min_nodes=3")
    assert [problem.path for problem in raised.value.problems] == ["cluster.min_nodes"]


def test_devices_that_others_use_are_not_free(prepared: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from rlcore_ray import placement

    monkeypatch.setattr(placement, "RESERVE_S", 1.0)
    other = ray.util.placement_group([{"CPU": 2}])
    assert other.wait(300)
    try:
        with pytest.raises(ConfigError) as raised:
            start(prepared("cluster.gpus_per_node=3"))
    finally:
        ray.util.remove_placement_group(other)
    (problem,) = raised.value.problems
    assert problem.path == "cluster.gpus_per_node"
    assert "with 4 CPUs, of which 2 CPUs are free" in problem.expected


def test_another_version_of_a_plugin_is_named_with_its_nodes(prepared: Prepare) -> None:
    whole = prepared("cluster.gpus_per_node=2")
    chosen = {**whole.chosen, "trainer": evolve(whole.chosen["trainer"], version="9.9")}
    with pytest.raises(PluginError) as caught:
        start(evolve(whole, chosen=chosen))
    assert "not every node has the plugins that the driver chose:\n  - node(s) 127.0.0.1: the driver chose" in str(caught.value)
    assert "this worker has version 1.0. Install the same version" in str(caught.value)


class Loading:
    """A worker that cannot load its plugins, after some seconds."""

    def call(self, name: str, seconds: float) -> Reply:
        time.sleep(seconds)
        return Reply(error=RemoteError.of(PluginError(f"{name} after {seconds:g} s"), Path("no log")))

    def where(self) -> str:
        return "which loads"


@pytest.fixture
def loading() -> Iterator[calls.Calls]:
    """Two ranks that cannot load their plugins."""
    import ray

    actor: Any = ray.remote(Loading)
    ranks = [
        calls.Rank(worker=WorkerInfo(rank=number, log_file=Path("no log")), actor=actor.options(num_cpus=0).remote())
        for number in range(2)
    ]
    pool = calls.Calls(ranks=ranks, cluster=RayConfig(gpus_per_node=2), progress=Progress())
    yield pool
    pool.kill()


def test_a_rank_that_is_slower_to_load_its_plugins_is_heard_too(monkeypatch: pytest.MonkeyPatch, loading: calls.Calls) -> None:
    """However long ago another one failed: the message names all nodes."""
    monkeypatch.setattr(calls, "GRACE_S", 0.0)
    outcomes = loading.outcomes("prepare", each=[(0.0,), (1.5,)], limit_s=60.0)
    assert [str(outcome) for outcome in outcomes.values()] == ["prepare after 0 s", "prepare after 1.5 s"]


def test_what_another_rank_raised_is_told_of_one_that_never_answers(
    monkeypatch: pytest.MonkeyPatch, loading: calls.Calls
) -> None:
    monkeypatch.setattr(calls, "QUERY_TIMEOUT_S", 0.1)
    loading.outcomes("prepare", each=[(0.0,), (0.0,)], limit_s=60.0)  # both processes are there
    with pytest.raises(WorkerError, match="no answer within 3 s") as caught:
        loading.outcomes("prepare", each=[(0.0,), (60.0,)], limit_s=3.0)
    assert [note.partition(" had failed before: ")[2] for note in caught.value.__notes__] == ["prepare after 0 s"]
