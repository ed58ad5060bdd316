"""Checks that two ranks of a trainer are one: launched here, in processes of their own, on one machine."""

import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve, fields, frozen

from rlcore.spi import (
    GENERATION_LOGPROBS,
    PREVIOUS_LOGPROBS,
    Provider,
    ScheduleSpec,
    TrainerContext,
    TrainerLayout,
    TrainStepResult,
    capabilities,
)
from rlcore.spi.arrays import Float32Array, Int64Array
from rlcore_conformance.references.fixtures import Device, require
from rlcore_conformance.references.probe import TOKEN_SHARE
from rlcore_conformance.references.reference import Reference
from rlcore_conformance.references.tensors import Values
from rlcore_conformance.trainers.batches import make_batch, spoiled, with_logprobs, without_loss
from rlcore_conformance.trainers.pieces import without_metrics
from rlcore_conformance.trainers.rank_script import NUM_RANKS, RankJob, RankReport, SharedStep, Shares, play, share_of
from rlcore_conformance.trainers.step_outcome import (
    StepOutcome,
    assert_close,
    assert_norms_add_up,
    assert_same_names,
    assert_same_step,
)
from rlcore_conformance.trainers.trainer_fixtures import OpenTrainer, TrainerFixtures, TrainerUnderTest, with_loss
from rlcore_rollout import serialization
from rlcore_torchkit.testing.ranks import PRELOADED, free_address, launch

TEMPERATURE = 0.8
PATIENCE_S = 240.0
"""Seconds for two processes to start, to import what they need, and to make a few small steps."""
PRELOADED.append("rlcore_conformance.trainers.rank_script")
PORT_TAKEN = ("address already in use", "eaddrinuse")
AGREEMENT = 1e-6
"""How far figures of ranks may be apart in a run."""
NOT_FINITE, OVER_A_BOUND = "not finite on one rank", "over a bound on both together"
EXPECTED_REFUSALS = {NOT_FINITE: "NonFiniteError", OVER_A_BOUND: "BoundError"}


@frozen(kw_only=True, eq=False)
class SingleRankRun:
    """The results of one rank that has all the data."""

    figures: tuple[tuple[Float32Array, ...], tuple[Float32Array, ...]]
    """Log-probabilities, or values, of the first step's shares, before that step."""
    steps: tuple[tuple[StepOutcome, Values], ...]
    """The results of the steps, each with the weights before it."""


class TrainerRanks(TrainerFixtures):
    """Two ranks, each with its part of the data, compute what one computes with all of it."""

    def test_two_ranks_are_one_trainer(
        self,
        provider: Provider,
        rank_config: Any,
        trainer_context: TrainerContext,
        open_trainer: OpenTrainer,
        reference: Reference,
        device: Device,
        tmp_path: Path,
    ) -> None:
        """Updates, figures, log-probabilities, exports, refusals and checkpoints; ranks agree on each."""
        require(provider, capabilities.MULTI_RANK)
        require_devices(device)
        context = evolve(trainer_context, schedule=ScheduleSpec(warmup_steps=8))
        with open_trainer(schedule=context.schedule) as trainer:
            job = make_job(provider, rank_config, context, trainer, reference.vocab_size, tmp_path)
            one = alone(trainer, job)
        assert_one_trainer(job, one)


def assert_one_trainer(job: RankJob, one: SingleRankRun) -> None:
    """Assert that the ranks of a job, launched here, do what one rank has done."""
    reports = launched(job)
    assert_two_or_one([report.layout for report in reports])
    for rank, report in enumerate(reports):
        for name, refusal in report.refusals.items():
            error = EXPECTED_REFUSALS[name]
            assert refusal == error, f"rank {rank}: a step that is {name}: found {refusal}; expected {error}"
        for number, (own, first) in enumerate(zip(report.steps, reports[0].steps, strict=True)):
            assert_agreement(f"step {number}: rank {rank}", own, first)
            expected, before = one.steps[number]
            assert_same_step(own, expected, before, whose=f"rank {rank}, step {number}: ")
            if expected.result.gradient_norms is not None:
                assert_same_norms(f"rank {rank}, step {number}", own.result, expected.result, job.tolerance)
        mine = share_of(one.figures, report.layout)
        assert_same_figures(f"rank {rank}: log-probabilities or values", report.figures, mine, job.tolerance)
        if report.reference is not None:
            assert_same_figures(f"rank {rank}: the reference's log-probabilities", report.reference, mine, job.tolerance)


def require_devices(device: Device) -> None:
    """Skip the test where the ranks would have to share a device."""
    if device == "cuda":
        import torch

        if torch.cuda.device_count() < NUM_RANKS:
            pytest.skip(f"needs {NUM_RANKS} CUDA devices")


def make_job(
    provider: Provider,
    config: Any,
    context: TrainerContext,
    trainer: TrainerUnderTest,
    vocab_size: int,
    directory: Path,
) -> RankJob:
    """Steps whose parts are of unequal size, one of them without a token to learn from on the second rank; the last with all
    that a request may hold."""
    batch, other = make_batch(vocab_size, seed=1), make_batch(vocab_size, seed=3)
    empty = without_loss(other)
    first = (batch.select(of(4)), batch.select(of(0, 1, 3))), (batch.select(of(5)), batch.select(of(2)))
    last = [with_logprobs(part, PREVIOUS_LOGPROBS, GENERATION_LOGPROBS) for part in (other, batch)]
    loss = trainer.loss
    if capabilities.PREVIOUS_LOGPROBS in provider.capabilities:
        loss = with_loss(loss, previous_logprobs="given")
    loss = evolve(loss, generation_mismatch=True, token_columns=(*loss.token_columns, GENERATION_LOGPROBS))
    options: dict[str, Any] = {"loss": loss}
    if capabilities.SCHEDULE_STEP in provider.capabilities:
        options["schedule_step"] = 5
    if capabilities.GRADIENT_NORMS in provider.capabilities:
        options["gradient_norms"] = True
    refused = {NOT_FINITE: shared(trainer, ((batch,), (spoiled(other),)), 1)}
    if capabilities.METRIC_BOUNDS in provider.capabilities:
        refused[OVER_A_BOUND] = shared(trainer, ((batch,), (other,)), 1, bounds={TOKEN_SHARE: 0.95})
    return RankJob(
        provider=travelling(provider),
        config=config,
        context=context,
        tolerance=trainer.tolerance,
        directory=directory,
        steps=(
            shared(trainer, first, 0),
            shared(trainer, ((batch, other), (empty, empty)), 1),
            shared(trainer, ((last[0],), (last[1],)), 2, **options),
        ),
        splits=capabilities.SPLIT_STEP in provider.capabilities,
        refused=refused,
    )


def travelling(provider: Provider) -> Provider:
    """The provider without functions of its own, which may be such as cannot travel to another process."""
    plain = fields(Provider)
    functions: tuple[Any, ...] = (plain.unavailable, plain.disabled_capabilities, plain.num_devices)
    return evolve(provider, **{function.name: function.default for function in functions})


def of(*indices: int) -> Int64Array:
    """int64 [N]"""
    return np.array(indices, np.int64)


def shared(trainer: TrainerUnderTest, shares: Shares, weight_version: int, **options: Any) -> SharedStep:
    """A step with the counts of all microbatches."""
    request = trainer.request(shares[0] + shares[1], weight_version, temperature=TEMPERATURE, **options)
    return SharedStep(request=request, shares=shares)


def alone(trainer: TrainerUnderTest, job: RankJob) -> SingleRankRun:
    """Return what one rank computes without the others."""
    first, second = (trainer.figures(share, temperature=TEMPERATURE) for share in job.steps[0].shares)
    steps, before = [], trainer.weights(0)
    for step in job.steps:
        result = trainer.handle.train_step(step.request)
        result = without_metrics(result) if job.splits_step(step) else result
        steps.append((trainer.after(result), before))
        before = steps[-1][0].weights
    return SingleRankRun(figures=(first, second), steps=(*steps, steps[-1]))


def launched(job: RankJob, attempts: int = 3) -> list[RankReport]:
    """Launch the ranks and return their reports, again where another process took the port. AssertionError with a rank's own
    traceback where one fails."""
    from torch.multiprocessing.spawn import ProcessException

    barrier = multiprocessing.get_context("forkserver").Barrier(NUM_RANKS)
    try:
        launch(play, (job, free_address(), barrier), NUM_RANKS, timeout_s=PATIENCE_S)
    except (TimeoutError, ProcessException) as error:
        if attempts > 1 and any(sign in str(error).lower() for sign in PORT_TAKEN):
            return launched(job, attempts - 1)
        raise AssertionError(f"two ranks do not do what one does: {error}") from None
    return [serialization.loads((job.directory / f"report-{rank}").read_bytes()) for rank in range(NUM_RANKS)]


def assert_two_or_one(layouts: Sequence[TrainerLayout]) -> None:
    """Two data-parallel ranks, or one that both are part of."""
    found = sorted((layout.data_parallel_rank, layout.data_parallel_size) for layout in layouts)
    assert found in ([(0, 1), (0, 1)], [(0, 2), (1, 2)]), (
        f"found data-parallel ranks, and their number, {found}; expected two, or one that both ranks are part of"
    )


def assert_agreement(who: str, found: StepOutcome, first: StepOutcome) -> None:
    """Compare a rank with rank 0: on metrics as nearly as a run demands it, on exports bit by bit."""
    metrics = [
        {"loss": one.loss, "grad_norm": one.grad_norm, **one.metrics, **(one.gradient_norms or {})}
        for one in (found.result, first.result)
    ]
    assert_same_names(f"{who}: figures", *metrics)
    for name, value in metrics[1].items():
        assert_close(f"{who}: {name}, of which rank 0 reports the one expected", metrics[0][name], value, AGREEMENT)
    for name, weight in first.weights.items():
        np.testing.assert_array_equal(found.weights[name], weight, err_msg=f"{who} exports another {name} than rank 0")


def assert_same_norms(who: str, found: TrainStepResult, expected: TrainStepResult, tolerance: float) -> None:
    """Assert that the norms of tensors' gradients are those of one rank, and make up the rank's `grad_norm`."""
    assert_norms_add_up(found)
    norms, others = found.gradient_norms or {}, expected.gradient_norms or {}
    assert_same_names(f"{who}: gradient_norms", norms, others)
    for name, norm in others.items():
        assert_close(f"{who}: the norm of {name}", norms[name], norm, tolerance)


def assert_same_figures(
    what: str, found: tuple[Float32Array, ...], expected: tuple[Float32Array, ...], tolerance: float
) -> None:
    """Assert that two ranks' log-probabilities, or values, of the same microbatches are equal."""
    for own, array in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, array, rtol=0, atol=tolerance, err_msg=what)
