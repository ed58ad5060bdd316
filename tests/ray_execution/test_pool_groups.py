"""Whole runs with the fakes in workers on Ray: the figures of a run in one process, whatever the layout."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest
from attrs import evolve

from rlcore.run.report.timing import read_timeline
from rlcore.spi import ContractError, OptimStepRequest, OptimStepResult, SetResidencyRequest, SetResidencyResult
from rlcore_ray.pool_groups import PoolTrainer

from .conftest import assert_close, read_metrics  # type: ignore[import-not-found]
from .stream_support import opened  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("local_ray")

LAYOUTS = {
    "two": ("cluster.gpus_per_node=2",),
    "one": ("cluster.gpus_per_node=1",),
    "helpers": ("cluster.gpus_per_node=4", "trainer.ranked.helpers=2"),
    "shared": ("cluster.gpus_per_node=4", "generator.ranked.span=2"),
    "separate": ("cluster.gpus_per_node=3", 'cluster.placement="separate"', "cluster.generator_gpus_per_node=1"),
    "apart": ("cluster.gpus_per_node=4", "cluster.reference_gpus_per_node=2"),
}
NUM_RANKS = {"two": 2, "one": 1, "helpers": 4, "shared": 4, "separate": 2, "apart": 2}


@pytest.mark.wide  # a planted fault keeps one
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_figures_are_those_of_one_process(run: Run, tmp_path: Path, layout: str) -> None:
    options = (
        "algorithm.ranked.previous_logprobs=true",
        "algorithm.ranked.kl_coefficient=0.1",
        "trainer.ranked.initial_scale=0.5",
        'observers.names=["watch"]',
        "observers.watch.word=seen",
        "generator.ranked.counts_drafts=true",
    )
    run("run.name=alone", *options)
    summary = run("run.name=pool", *options, *LAYOUTS[layout], "training.warn_token_mult_prob_error=1.000000000001")
    runs = tmp_path / "runs"
    assert_close(read_metrics(runs / "pool"), read_metrics(runs / "alone"))
    assert read_metrics(runs / "pool")[1]["speculative/mean_acceptance_length"] == 2.0
    assert summary["steps"] == 4
    worst = pandas.read_parquet(runs / "pool" / "logprob_mismatch" / "step-000001.parquet")
    assert (worst["trainer_version"] == 0).all(), "of the update itself"
    assert worst["token_mult_prob_error"].between(1.0, 1.0 + 1e-5).all(), "each token's own: rounding alone"
    watched = {path.name: path.read_text() for path in (runs / "pool").glob("watch-*")}
    assert watched == {f"watch-{rank}": "seen" for rank in range(NUM_RANKS[layout])}, "by each rank"
    spans = read_timeline(runs / "pool" / "timeline.jsonl")
    of_ranks = {(span.step, len(span.seconds)) for span in spans if (span.role, span.name) == ("trainer", "train_step")}
    assert of_ranks == {(step, NUM_RANKS[layout]) for step in range(1, 5)}, "of each rank"
    assert {"train", "refit"} <= {span.name for span in spans if span.role == "driver"}
    assert "this is rank 0" in (runs / "pool" / "logs" / "rank-0.log").read_text()


@pytest.mark.wide(keep=["two"])
@pytest.mark.parametrize("layout", ["two", "helpers"])
def test_a_critic_is_trained_on_the_same_ranks(run: Run, tmp_path: Path, layout: str) -> None:
    options = (
        "algorithm.ranked.critic=true",
        "critic.learning_rate=0.01",
        "trainer.ranked.initial_scale=0.3",
        "evaluation.at_end=false",
    )
    run("run.name=alone", *options)
    run("run.name=pool", *options, *LAYOUTS[layout], "run.num_steps=2", "checkpoint.every_n_steps=1")
    run("run.name=pool", *options, *LAYOUTS[layout], resume=True)
    found = read_metrics(tmp_path / "runs" / "pool")
    assert_close(found, read_metrics(tmp_path / "runs" / "alone"))
    assert found[-1]["critic/grad_norm"] > 0


def test_neighbours_share_a_generator_that_spans_their_devices(run: Run, tmp_path: Path) -> None:
    run("cluster.gpus_per_node=4", "generator.ranked.span=2", "run.num_steps=1")
    logs = [tmp_path / "runs" / "run" / "logs" / f"rank-{rank}.log" for rank in range(4)]
    assert ["a generator on" in log.read_text() for log in logs] == [True, False, True, False]


def test_a_checkpoint_resumes_in_another_layout(run: Run, tmp_path: Path) -> None:
    unmeasured, recorded = ("evaluation.at_end=false",), ("evaluation.at_end=false", 'sinks.names=["recorded"]')
    run("run.name=whole", "run.num_steps=6", *unmeasured)
    run("run.name=part", "cluster.gpus_per_node=2", *recorded)
    part = tmp_path / "runs" / "part"
    sink_saw = [(part / "recorded.toml").read_text()]
    run("run.name=part", "run.num_steps=6", "cluster.gpus_per_node=3", *recorded, resume=True)
    assert_close(read_metrics(part), read_metrics(tmp_path / "runs" / "whole"))
    sink_saw.append((part / "recorded.toml").read_text())
    written = [(part / name).read_text() for name in ("recipe-001.toml", "recipe.toml")]
    assert list(map(tomllib.loads, sink_saw)) == list(map(tomllib.loads, written))
    assert [tomllib.loads(recipe)["cluster"]["gpus_per_node"] for recipe in sink_saw] == [2, 3]


def test_norms_of_gradients_come_from_all_ranks(tmp_path: Path) -> None:
    with opened(tmp_path) as pool:
        found = pool.train(gradient_norms=True)
    assert found.gradient_norms is not None
    assert sum(norm**2 for norm in found.gradient_norms.values()) == pytest.approx(found.grad_norm**2)
    assert min(found.gradient_norms.values()) > 0.0


@pytest.mark.parametrize("norms", [{"a": 0.5, "b": 1.0}, {"a": 1.0}, None])
def test_ranks_that_disagree_on_a_norm_are_refused(norms: Any) -> None:
    result = OptimStepResult(weight_version=1, grad_norm=1.4, learning_rate=0.1, gradient_norms={"a": 1.0, "b": 1.0})
    lost: list[str] = []
    calls: Any = SimpleNamespace(
        ranks=range(2), workers=["first", "second"], lose=lost.append, together=lambda *_: [result, other]
    )
    trainer = PoolTrainer(
        calls=calls, capabilities=frozenset(), model="policy", members=[], max_tokens_per_microbatch=8, temperature=1.0
    )
    request, other = OptimStepRequest(pieces=1, weight_version=0), result
    assert trainer.optim_step(request) is result
    other = evolve(result, gradient_norms=norms)
    with pytest.raises(ContractError, match="optim_step: second returned"):
        trainer.optim_step(request)
    assert lost


@pytest.mark.parametrize(("reserved", "expected"), [((7, 9), 9), ((None, 9), 9), ((None, None), None)])
def test_what_a_trainer_leaves_is_that_of_the_rank_with_the_most(reserved: tuple[Any, ...], expected: int | None) -> None:
    left = [SetResidencyResult(device_bytes=size, reserved_bytes=each) for size, each in zip((6, 5), reserved, strict=True)]
    calls = SimpleNamespace(ranks=range(2), together=lambda *_: left)
    request = SetResidencyRequest(weights="device", state="host")
    found = PoolTrainer.set_residency(SimpleNamespace(calls=calls, model="policy"), request)  # type: ignore[arg-type]
    assert found == SetResidencyResult(device_bytes=6, reserved_bytes=expected)
