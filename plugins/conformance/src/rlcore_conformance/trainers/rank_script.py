"""The script of two ranks: the same calls on both, each with its part of the data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from attrs import evolve, frozen

from rlcore.registry.binding import build_trainer
from rlcore.registry.trainer_handle import TrainerHandle
from rlcore.spi import (
    BoundError,
    LoadStateRequest,
    NonFiniteError,
    Provider,
    RankInfo,
    SaveStateRequest,
    TokenBatch,
    TrainerContext,
    TrainerLayout,
    TrainStepRequest,
)
from rlcore.spi.arrays import Float32Array
from rlcore_conformance.references.fixtures import entry_of
from rlcore_conformance.trainers.pieces import step_in_pieces, without_metrics
from rlcore_conformance.trainers.step_outcome import StepOutcome
from rlcore_conformance.trainers.trainer_fixtures import TrainerUnderTest
from rlcore_rollout import serialization

NUM_RANKS = 2
ItemT = TypeVar("ItemT")
Shares: TypeAlias = tuple[tuple[TokenBatch, ...], tuple[TokenBatch, ...]]
"""The microbatches of a step for each of two data-parallel ranks, equally many."""


@frozen(kw_only=True, eq=False)
class SharedStep:
    """A step of two ranks."""

    request: TrainStepRequest
    """The request of one rank which has all the microbatches."""
    shares: Shares

    def of(self, layout: TrainerLayout) -> TrainStepRequest:
        """A rank's request."""
        return evolve(self.request, microbatches=share_of(self.shares, layout))


@frozen(kw_only=True, eq=False)
class RankJob:
    """The work of a rank; it travels to another process."""

    provider: Provider
    config: Any
    context: TrainerContext
    tolerance: float
    directory: Path
    """Empty: for the checkpoint, and for each rank's report in `report-<rank>`."""
    steps: tuple[SharedStep, ...]
    """One after the other, at the versions 0, 1, 2; the last is made twice, from the same checkpoint."""
    splits: bool
    """True where the second step is made in pieces of one microbatch."""
    refused: Mapping[str, SharedStep]
    """Steps at version 1 that every rank has to refuse, by what is wrong with them."""

    def splits_step(self, step: SharedStep) -> bool:
        """Return whether a step is made in pieces, whose metrics nobody compares."""
        return self.splits and step.request.weight_version == 1


@frozen(kw_only=True, eq=False)
class RankReport:
    """The figures that one rank computed and received."""

    layout: TrainerLayout
    figures: tuple[Float32Array, ...]
    """Log-probabilities, or values, of the first step's microbatches of this rank, before the step."""
    reference: tuple[Float32Array, ...] | None
    """The log-probabilities under the reference policy, after all steps."""
    steps: tuple[StepOutcome, ...]
    refusals: Mapping[str, str]
    """The outcomes of steps that have to be refused: the error's class, or "taken"."""


def play(rank: int, job: RankJob, rendezvous: str, barrier: Any) -> None:
    """The whole script on one rank; its report goes into job.directory."""
    entry = entry_of("trainer", job.provider, job.context.rank_info.device)
    rank_info = RankInfo(
        rank=rank, world_size=NUM_RANKS, local_rank=rank, device=job.context.rank_info.device, rendezvous=rendezvous
    )
    handle = build_trainer(entry, evolve(job.context, rank_info=rank_info), job.config)
    try:
        trainer = TrainerUnderTest(
            handle=handle, provider=job.provider, loss=job.steps[0].request.loss, tolerance=job.tolerance
        )
        report = _play(trainer, job, barrier)
    finally:
        handle.close()
    (job.directory / f"report-{rank}").write_bytes(serialization.dumps(report))


def _play(trainer: TrainerUnderTest, job: RankJob, barrier: Any) -> RankReport:
    layout, steps, refusals = trainer.handle.layout, [], {}
    own, temperature = share_of(job.steps[0].shares, layout), job.steps[0].request.temperature
    figures = trainer.figures(own, temperature=temperature)
    for step in job.steps[:-1]:
        steps.append(_taken(trainer, step, splits=job.splits_step(step)))
        if len(steps) == 1:
            refusals = {name: _refusal(trainer.handle, refused) for name, refused in job.refused.items()}
    state = job.directory / "state"
    state.mkdir(exist_ok=True)
    trainer.handle.save_state(SaveStateRequest(directory=state, kind="resume"))
    barrier.wait()  # the core loads only when all ranks have saved
    for _ in range(2):
        steps.append(_taken(trainer, job.steps[-1]))
        trainer.handle.load_state(LoadStateRequest(directory=state))
    reference = None
    if job.context.needs_reference:
        reference = trainer.logprobs(own, len(job.steps) - 1, model="reference", temperature=temperature)
    return RankReport(layout=layout, figures=figures, reference=reference, steps=tuple(steps), refusals=refusals)


def _taken(trainer: TrainerUnderTest, step: SharedStep, *, splits: bool = False) -> StepOutcome:
    request = step.of(trainer.handle.layout)
    result = without_metrics(step_in_pieces(trainer.handle, request)) if splits else trainer.handle.train_step(request)
    return trainer.after(result, max_bucket_bytes=1 << 14)


def _refusal(handle: TrainerHandle, step: SharedStep) -> str:
    try:
        handle.train_step(step.of(handle.layout))
    except (BoundError, NonFiniteError) as error:
        return type(error).__name__
    return "taken"


def share_of(shares: tuple[tuple[ItemT, ...], tuple[ItemT, ...]], layout: TrainerLayout) -> tuple[ItemT, ...]:
    """A rank's microbatches, or what belongs to them: its own, or all where the ranks are one data-parallel rank."""
    if layout.data_parallel_size == 1:
        return shares[0] + shares[1]
    return shares[layout.data_parallel_rank]
