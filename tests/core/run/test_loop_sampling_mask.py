"""What truncated sampling had kept travels from the generator to the trainer, with which both speak of one distribution."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from rlcore.registry.discovery import Registry
from rlcore.spi import LogprobsRequest, LogprobsResult, TrainStepRequest, TrainStepResult, hookimpl
from rlcore.testing.fakes.policy import LEFT_OUT
from rlcore.testing.fakes.trainer import FakeTrainer

from .conftest import read_metrics  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]
TRUNCATED = (
    "rollout.top_p=0.8",
    "rollout.top_k=12",
    "trainer.fake.initial_scale=0.5",
    "algorithm.fake.previous_logprobs=true",
    "run.num_steps=3",
)
"""A ratio to the start of the step, which several updates need, and weights that prefer some tokens to others."""
TURNS = ("rollout.max_turns=2", "rollout.max_response_tokens=30", "environment.fake.num_turns=2")
AHEAD = ("async.max_staleness=1", "algorithm.fake.generation_ratio=true")
carried: list[tuple[str, bool]] = []


class WatchingTrainer(FakeTrainer):
    """Notes which calls have a mask; every token that was sampled has to be probable enough within its own."""

    @hookimpl
    def train_step(self, request: TrainStepRequest) -> TrainStepResult:
        carried.extend(("train_step", batch.sampling_mask is not None) for batch in request.microbatches)
        result: TrainStepResult = super().train_step(request)
        return result

    @hookimpl
    def get_logprobs(self, request: LogprobsRequest) -> LogprobsResult:
        carried.extend((request.model, batch.sampling_mask is not None) for batch in request.microbatches)
        result: LogprobsResult = super().get_logprobs(request)
        assert min(column.min() for column in result.logprobs) > LEFT_OUT / 2
        return result


@pytest.mark.parametrize(
    "options", [(), TURNS, (*AHEAD, "async.on_stale=rescore"), (*AHEAD, "async.partial_rollouts=restart")], ids=str
)
def test_generator_and_trainer_agree_in_truncated_sampling(
    run: Run, registry_with: Callable[..., Registry], tmp_path: Path, options: tuple[str, ...]
) -> None:
    carried.clear()
    run(*TRUNCATED, *options, "algorithm.fake.kl_coefficient=0.1", registry=registry_with(trainer=WatchingTrainer))
    compared = [record for record in read_metrics(tmp_path / "runs" / "run") if "importance_ratio" in record]
    assert compared
    for record in compared:
        assert record["importance_ratio"] == pytest.approx(1.0, abs=1e-5)
        assert record["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-5)
    assert set(carried) == {("train_step", True), ("policy", True), ("reference", True)}


def test_where_the_bias_is_accepted_nothing_is_reported(
    run: Run, registry_with: Callable[..., Registry], tmp_path: Path
) -> None:
    carried.clear()
    run(*TRUNCATED, "rollout.accept_truncation_bias=true", registry=registry_with(trainer=WatchingTrainer))
    assert not any("importance_ratio" in record for record in read_metrics(tmp_path / "runs" / "run"))
    assert {has_mask for _, has_mask in carried} == {False}


def test_samples_on_disk_say_what_was_kept(run: Run, tmp_path: Path) -> None:
    run(*TRUNCATED, *TURNS)
    table = pq.read_table(next((tmp_path / "runs" / "run" / "rollouts").glob("step-*.parquet")))
    num_truncated = 0
    for row in table.to_pylist():
        for token, kept, version in zip(row["tokens"], row["sampling_mask"], row["weight_versions"], strict=True):
            assert version >= 0 or not kept
            assert not kept or kept.count(token) == 1
            assert len(kept) <= 12
            num_truncated += version >= 0 and len(kept) > 0
    assert num_truncated == int(np.sum(table["num_generated"].to_numpy()))
