"""Several nodes, which here are several of Ray's on one machine: ranks spread over them, and one that leaves."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas
import pytest

from rlcore.spi import WorkerError
from rlcore_ray.config import RayConfig
from rlcore_ray.session import ray_session

from .conftest import Notes, assert_close, read_metrics  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]
NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 * 2**20}


@pytest.fixture
def nodes(installed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A running cluster of two nodes with two CPUs each, which runs join by its address. It is from before its user's token, as
    where a local run on the head wrote one since."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    cluster.second = cluster.add_node(**NODE)
    token = tmp_path / "token"
    token.write_text("0123456789abcdef" * 4)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    yield cluster
    cluster.shutdown()


class Leaves(Notes):
    """Takes the second node away after a step; another one comes in its place, or none."""

    def __init__(self, cluster: Any, step: int, *, is_replaced: bool) -> None:
        super().__init__()
        self.cluster, self.last, self.is_replaced = cluster, step, is_replaced

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.last and self.cluster.second is not None:
            self.cluster.remove_node(self.cluster.second, allow_graceful=False)
            self.cluster.second = None

    def note(self, text: str) -> None:
        super().note(text)
        if self.is_replaced and "restart 1" in text:
            self.cluster.second = self.cluster.add_node(**NODE)
            self.last = -1


def test_an_engine_that_fails_on_one_node_joins_the_stream_again_in_flight(run: Run, tmp_path: Path, nodes: Any) -> None:
    """Beside the trainer, on devices of its own; what it had taken is generated on the other node."""
    options = (
        "cluster.nodes=2",
        "cluster.gpus_per_node=2",
        "cluster.placement=separate",
        "cluster.generator_gpus_per_node=1",
        f"cluster.address={nodes.address}",
        "algorithm.ranked.generation_ratio=true",
        "async.max_staleness=2",
        "environment.ranked.num_train_rows=64",
        "evaluation.every_n_steps=0",
        "logging.rollouts_every_n_steps=1",
        "trainer.ranked.pause_s=0.2",
        "training.minibatches_per_step=1",
        f"generator.ranked.folder={tmp_path}",
        "generator.ranked.fault={kind='memory', rank=1, hook='stream', version=0}",
    )
    notes = Notes()
    with ray_session(RayConfig(nodes=2, address=nodes.address), "cpu", None):
        run(*options, progress=notes)
    failed = [text for text in notes.texts if "the engine of rank 1 " in text]
    assert len(failed) == 1, notes.texts
    directory = tmp_path / "runs" / "run"
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert sum(record.get("generation/engine_restarts", 0) for record in records) == 1
    samples = pandas.concat([pandas.read_parquet(path) for path in (directory / "rollouts").glob("step-*.parquet")])
    prompts = samples.groupby(["step", "group"])["prompt"].first()
    assert len(prompts) == prompts.nunique() == 24, "each prompt once"


@pytest.mark.wide
def test_a_node_that_leaves_costs_a_restart_on_another_or_the_run(run: Run, tmp_path: Path, nodes: Any) -> None:
    options = ("cluster.nodes=2", "cluster.gpus_per_node=2", f"cluster.address={nodes.address}")
    with ray_session(RayConfig(nodes=2, address=nodes.address), "cpu", None):
        notes = Leaves(nodes, step=2, is_replaced=True)
        # Many steps: processes of a node that leaves may well finish the one that they are in.
        run("run.name=alone", "run.num_steps=20")
        run("run.name=left", "run.num_steps=20", "cluster.wait_s=20", *options, progress=notes)
        assert_close(read_metrics(tmp_path / "runs" / "left"), read_metrics(tmp_path / "runs" / "alone"))
        assert len([text for text in notes.texts if "restart 1 of 3" in text]) == 1
        with pytest.raises(WorkerError, match="could not be started") as raised:
            run("run.name=short", "run.num_steps=1000", *options, progress=Leaves(nodes, step=2, is_replaced=False))
        lines = str(raised.value).splitlines()
        assert lines[1].startswith("  - cluster.nodes: found 2 node(s) with 2 CPUs each; ")
        assert lines[2].startswith("They were to be, since: ")


@pytest.mark.wide
def test_a_node_that_leaves_for_good_leaves_a_smaller_run_with_the_same_sums(run: Run, tmp_path: Path, nodes: Any) -> None:
    options = ("cluster.nodes=2", "cluster.gpus_per_node=2", f"cluster.address={nodes.address}", "cluster.min_nodes=1")
    with ray_session(RayConfig(nodes=2, address=nodes.address), "cpu", None):
        notes = Leaves(nodes, step=2, is_replaced=False)
        run("run.name=alone", "run.num_steps=20")
        run("run.name=smaller", "run.num_steps=20", *options, progress=notes)
    assert_close(read_metrics(tmp_path / "runs" / "smaller"), read_metrics(tmp_path / "runs" / "alone"))
    assert [text for text in notes.texts if "with 1 of 2 nodes" in text]
    assert nodes.second is None
