"""What each update of a step is given: declared log-probabilities, its place in the schedule, and nothing where it would learn
nothing. The trainer is the fake, which says what it was sent."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.spi import (
    ADVANTAGES,
    GENERATION_LOGPROBS,
    PREVIOUS_LOGPROBS,
    REFERENCE_LOGPROBS,
    AlgorithmNeeds,
    LogprobsRequest,
    LogprobsResult,
    RolloutBatch,
    TokenBatch,
    TrainingBatch,
    TrainStepRequest,
    TrainStepResult,
    capabilities,
    hookimpl,
)
from rlcore.testing.fakes import FAKE_ALGORITHM, FAKE_ENVIRONMENT, FAKE_GENERATOR, FAKE_TRAINER
from rlcore.testing.fakes.algorithm import FakeAlgorithm
from rlcore.testing.fakes.trainer import FakeTrainer

from .conftest import read_metrics  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]

SPARSE = ("rollout.samples_per_prompt=2", "rollout.max_response_tokens=1", "training.prompts_per_step=4")
"""Many groups whose rewards are equal."""
sent: list[tuple[TrainStepRequest, TrainStepResult]] = []
computed: list[LogprobsRequest] = []


class RecordingTrainer(FakeTrainer):
    """Keeps what it is sent."""

    @hookimpl
    def train_step(self, request: TrainStepRequest) -> TrainStepResult:
        result = super().train_step(request)
        sent.append((request, result))
        return result

    @hookimpl
    def get_logprobs(self, request: LogprobsRequest) -> LogprobsResult:
        computed.append(request)
        return super().get_logprobs(request)


def registry(less: frozenset[str] = frozenset()) -> Registry:
    trainer = evolve(
        FAKE_TRAINER, backend=f"{__name__}:{RecordingTrainer.__name__}", capabilities=FAKE_TRAINER.capabilities - less
    )
    return Registry.from_providers(
        {
            "trainer": [trainer],
            "generator": [FAKE_GENERATOR],
            "algorithm": [FAKE_ALGORITHM],
            "environment": [FAKE_ENVIRONMENT],
        }
    )


@pytest.fixture(autouse=True)
def _fresh() -> None:
    sent.clear()
    computed.clear()


def test_each_update_declares_where_the_previous_logprobs_are(run: Run) -> None:
    options = ("algorithm.fake.previous_logprobs=true", "algorithm.fake.kl_coefficient=0.1", "training.minibatches_per_step=4")
    run(*options, "run.num_steps=2", registry=registry())
    declared = [request.loss.previous_logprobs for request, _ in sent]
    assert declared == ["unchanged", "given", "given", "given"] * 2
    for request, _ in sent:
        columns = set(request.loss.token_columns)
        assert REFERENCE_LOGPROBS in columns
        assert (PREVIOUS_LOGPROBS in columns) == (request.loss.previous_logprobs == "given")
        assert all(columns <= microbatch.token_columns.keys() for microbatch in request.microbatches)
    assert [request.model for request in computed] == ["reference", "policy"] * 2


class EarlyReference(FakeAlgorithm):
    """Reads the reference policy's log-probabilities before it has a batch, and not in its loss."""

    @property
    def needs(self) -> AlgorithmNeeds:
        return evolve(super().needs, reference_logprobs=True, reference_logprobs_in_rollouts=True)

    def build_batch(self, rollouts: RolloutBatch) -> TrainingBatch:
        seen.append(rollouts.batch)
        return super().build_batch(rollouts)


seen: list[TokenBatch] = []


def test_reference_logprobs_that_rewards_depend_on_are_there_before_the_batch_and_not_sent_again(run: Run) -> None:
    seen.clear()
    early = evolve(FAKE_ALGORITHM, backend=f"{__name__}:EarlyReference")
    others = tuple(entry for entry in registry().entries if entry.role != "algorithm")
    entries = (*others, *Registry.from_providers({"algorithm": [early]}).entries)
    run("training.minibatches_per_step=2", "run.num_steps=2", registry=evolve(registry(), entries=entries))
    assert [request.model for request in computed] == ["reference"] * 2
    del seen[0]  # the made-up samples of the check
    for batch in seen:
        column = batch.token_columns[REFERENCE_LOGPROBS]
        assert column.dtype == np.float32
        assert (column[batch.loss_mask] < 0).all()
    # The reference policy is what the first step samples with.
    first = seen[0].token_columns
    np.testing.assert_allclose(
        first[REFERENCE_LOGPROBS][seen[0].loss_mask], first[GENERATION_LOGPROBS][seen[0].loss_mask], rtol=1e-4, atol=1e-5
    )
    assert len(seen) == 2
    assert all(REFERENCE_LOGPROBS not in request.loss.token_columns for request, _ in sent)


def test_an_algorithm_without_a_ratio_costs_no_pass_and_declares_that_nobody_computed_them(run: Run) -> None:
    run("training.minibatches_per_step=2", "run.num_steps=1", registry=registry())
    assert [request.loss.previous_logprobs for request, _ in sent] == ["unchanged", "absent"]
    assert not computed


def test_the_schedule_follows_the_steps_of_the_run_where_updates_are_left_out(run: Run, tmp_path: Path) -> None:
    decay = ('schedule.decay="linear"', "schedule.min_learning_rate_ratio=0.0", "optimizer.learning_rate=0.1")
    run(*SPARSE, *decay, "training.minibatches_per_step=4", "run.num_steps=12", registry=registry())
    records = read_metrics(tmp_path / "runs" / "run")[1:]
    updates = [int(record["updates"]) for record in records]
    assert 0 < sum(updates) < 48
    places = iter(sent)
    for step, made in enumerate(updates):
        for _ in range(made):
            request, result = next(places)
            assert 4 * step <= request.schedule_step < 4 * (step + 1)
            assert result.learning_rate == pytest.approx(0.1 * (1 - request.schedule_step / 48))
    assert records[-1]["weight_version"] == sum(updates)


def test_a_minibatch_without_a_signal_makes_no_update(run: Run) -> None:
    run(*SPARSE, "training.minibatches_per_step=4", "run.num_steps=12", registry=registry())
    assert 0 < len(sent) < 48
    assert all(any(batch.token_columns[ADVANTAGES].any() for batch in request.microbatches) for request, _ in sent)


def test_a_minibatch_of_equal_rewards_has_a_signal_where_the_loss_has_other_terms(run: Run, tmp_path: Path) -> None:
    options = ("training.minibatches_per_step=4", "run.num_steps=12", "algorithm.fake.kl_coefficient=0.1")
    run(*SPARSE, *options, registry=registry())
    updates = [record["updates"] for record in read_metrics(tmp_path / "runs" / "run")[1:]]
    assert set(updates) <= {0.0, 4.0}
    assert 4.0 in updates


def test_a_constant_rate_needs_no_place_in_the_schedule(run: Run) -> None:
    run(
        *SPARSE,
        "training.minibatches_per_step=4",
        "run.num_steps=4",
        registry=registry(frozenset({capabilities.SCHEDULE_STEP})),
    )
    assert [request.schedule_step for request, _ in sent] == list(range(len(sent)))
