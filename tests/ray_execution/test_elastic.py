"""Engines that join a run and leave it with their nodes, which here are several of Ray's on one machine."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import ConfigError, NamedTensor, TensorSpec, WeightBucket, WeightExport
from rlcore_ray.config import RayConfig
from rlcore_ray.published_weights import Publisher
from rlcore_ray.session import ray_session

from .conftest import Notes, assert_close, read_metrics  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]
Prepare = Callable[..., RunPlan]
MEMORY = {"object_store_memory": 80 * 2**20}
FIRST_SLOT = 2
"""The number of the first engine, behind those of two ranks."""
WAIT_S = 60.0


@pytest.fixture
def nodes(installed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A running cluster with room for two ranks, and none for engines."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **MEMORY})
    token = tmp_path / "token"
    token.write_text("0123456789abcdef" * 4)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    with ray_session(RayConfig(address=cluster.address), "cpu", None):
        yield cluster
    cluster.shutdown()


class Changes(Notes):
    """Adds a node after a step, waits until its engine has generated, and takes the node away again, or drains it."""

    def __init__(self, cluster: Any, folder: Path, step: int, *, drains: bool = False) -> None:
        super().__init__()
        self.cluster, self.folder, self.begins, self.drains = cluster, folder, step, drains
        self.node: Any = None
        self.has_left = False

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.begins:
            self.node = self.cluster.add_node(num_cpus=1, **MEMORY)
            self.wait_for("takes part")
        if self.node is not None and not self.has_left and (self.folder / f"generated-{FIRST_SLOT}").exists():
            self.has_left = True
            if self.drains:
                drain(self.cluster.address, self.node.node_id)
                self.wait_for("its node is drained")
            else:
                self.cluster.remove_node(self.node, allow_graceful=False)

    def wait_for(self, words: str) -> None:
        """Until a warning with these words has come."""
        end = time.monotonic() + WAIT_S
        while not any(words in text for text in self.texts):
            assert time.monotonic() < end, self.texts
            time.sleep(0.05)


def drain(address: str, node: str) -> None:
    """Ask Ray to let a node go, as its autoscaler does."""
    command = ("drain-node", "--address", address, "--node-id", node, "--reason", "DRAIN_NODE_REASON_PREEMPTION")
    subprocess.run(
        [Path(sys.executable).with_name("ray"), *command, "--reason-message", "a test"], check=True, capture_output=True
    )


def options(nodes: Any, folder: Path, **elastic: int) -> tuple[str, ...]:
    table = ", ".join(f"{name} = {value}" for name, value in ({"max": 1} | elastic).items())
    places = ("cluster.gpus_per_node=2", f"cluster.address={nodes.address}", f"cluster.elastic={{{table}}}")
    return (*places, "refit.channel=in_process", f"generator.ranked.folder={folder}", "generator.ranked.pause_s=0.02")


def test_an_engine_that_joins_and_leaves_changes_no_figure(run: Run, tmp_path: Path, nodes: Any) -> None:
    run("run.name=fixed", "run.num_steps=12")
    notes = Changes(nodes, tmp_path, step=3)
    run("run.name=elastic", "run.num_steps=12", *options(nodes, tmp_path), progress=notes)
    assert notes.has_left, notes.texts
    assert len([text for text in notes.texts if "is out of the run" in text]) == 1, notes.texts
    assert_close(read_metrics(tmp_path / "runs" / "elastic"), read_metrics(tmp_path / "runs" / "fixed"))


def test_an_engine_of_a_node_that_is_drained_finishes_its_samples(run: Run, tmp_path: Path, nodes: Any) -> None:
    run("run.name=fixed", "run.num_steps=8")
    notes = Changes(nodes, tmp_path, step=3, drains=True)
    run("run.name=elastic", "run.num_steps=8", *options(nodes, tmp_path), progress=notes)
    assert notes.has_left, notes.texts
    assert not [text for text in notes.texts if "are dealt to the others" in text], notes.texts
    assert_close(read_metrics(tmp_path / "runs" / "elastic"), read_metrics(tmp_path / "runs" / "fixed"))


@pytest.mark.parametrize("drains", [False, True], ids=["dies", "drained"])
def test_samples_of_an_engine_that_leaves_in_flight_come_once(run: Run, tmp_path: Path, nodes: Any, drains: bool) -> None:
    ahead = (
        "async.max_staleness=2",
        "environment.ranked.num_train_rows=128",
        "evaluation.every_n_steps=0",
        "logging.rollouts_every_n_steps=1",
        "algorithm.ranked.generation_ratio=true",
        "trainer.ranked.pause_s=0.1",
        "training.minibatches_per_step=1",
        "run.num_steps=16",
    )
    notes = Changes(nodes, tmp_path, step=2, drains=drains)
    run(*ahead, *options(nodes, tmp_path), progress=notes)
    assert notes.has_left, notes.texts
    directory = tmp_path / "runs" / "run"
    samples = pandas.concat([pandas.read_parquet(path) for path in (directory / "rollouts").glob("step-*.parquet")])
    prompts = samples.groupby(["step", "group"])["prompt"].first()
    assert len(prompts) == prompts.nunique() == 96, "each prompt once"
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert sum(record.get("generation/engine_restarts", 0) for record in records) == 0


def test_an_engine_has_the_devices_that_it_spans(run: Run, tmp_path: Path, nodes: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        run(*options(nodes, tmp_path, gpus=1), "generator.ranked.span=2", "refit.channel=auto")
    assert [problem.path for problem in raised.value.problems] == ["cluster.elastic.gpus"]


def test_drafts_are_those_of_all_engines(run: Run, tmp_path: Path, nodes: Any) -> None:
    """Each sample counts the same drafts, whichever engine has made it; a refit brings an engine's counts."""
    counted = ("run.num_steps=6", "generator.ranked.counts_drafts=true")
    run("run.name=fixed", *counted)
    nodes.add_node(num_cpus=1, **MEMORY)
    run("run.name=elastic", *counted, *options(nodes, tmp_path, min=1))
    assert (tmp_path / f"generated-{FIRST_SLOT}").exists()
    found, expected = (read_metrics(tmp_path / "runs" / name) for name in ("elastic", "fixed"))
    assert sum(record.get("speculative/draft_tokens", 0.0) for record in expected) > 0
    assert_close(found, expected)


def test_an_export_is_read_to_its_end_also_where_the_store_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait for this one in the export."""
    import ray

    taken = []

    def put(bucket: object) -> int:
        if len(taken) == 1:
            raise MemoryError("no room on purpose")
        taken.append(bucket)
        return 0

    monkeypatch.setattr(ray, "put", put)
    specs = tuple(TensorSpec(name=str(number), shape=(2,), dtype="float32") for number in range(3))
    tensors = [NamedTensor(name=spec.name, tensor=np.zeros(2, np.float32), digest=0) for spec in specs]
    buckets = iter([WeightBucket(tensors=(tensor,)) for tensor in tensors])
    publisher = Publisher()
    export = publisher.watch(WeightExport(weight_version=1, specs=specs, buckets=buckets, persistent=False))
    assert [bucket.tensors[0].name for bucket in export.buckets] == ["0", "1", "2"]
    assert publisher.published() is None
    assert publisher.failure is not None
    assert "no room on purpose" in publisher.failure


def test_a_run_waits_for_its_least_engines_and_names_them(
    run: Run, tmp_path: Path, nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlcore_ray import elastic

    monkeypatch.setattr(elastic, "LEAST_WAIT_S", 1.0)
    with pytest.raises(ConfigError) as raised:
        run("run.name=none", *options(nodes, tmp_path, min=1, max=2))
    (problem,) = raised.value.problems
    assert (problem.path, problem.found) == ("cluster.elastic.min", "0 engine(s) that a node has room for, after 1 s")
    nodes.add_node(num_cpus=1, **MEMORY)
    notes = Notes()
    run("run.name=one", "cluster.wait_s=60", *options(nodes, tmp_path, min=1, max=2), progress=notes)
    assert len([text for text in notes.texts if "takes part" in text]) == 1, notes.texts


@pytest.mark.parametrize(
    ("given", "paths"),
    [
        (("cluster.elastic={min = 3, max = 2}",), ["cluster.elastic", "cluster.elastic.min"]),
        (("cluster.elastic={max = 2}", "cluster.collectors=2", "cluster.address=auto"), ["cluster.collectors"]),
        (("cluster.elastic={min = 1}", "cluster.address=auto"), ["cluster.elastic.max"]),
        (("cluster.elastic={max = 2}",), ["cluster.elastic"]),
    ],
)
def test_what_does_not_go_with_such_engines_is_named(prepared: Prepare, given: tuple[str, ...], paths: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        prepared(*given)
    assert sorted(problem.path for problem in raised.value.problems) == paths
