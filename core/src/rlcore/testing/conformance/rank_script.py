"""What each of two ranks does in the kit: the same calls on both, each with its part of the data."""

import pickle
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from attrs import evolve, field, frozen

from rlcore.plugins.binding import build_trainer
from rlcore.plugins.handles import TrainerHandle
from rlcore.spi import (
    BoundError,
    ExportWeightsRequest,
    LoadStateRequest,
    LogprobsRequest,
    NonFiniteError,
    Provider,
    RankSpec,
    SaveStateRequest,
    TokenBatch,
    TrainerContext,
    TrainerLayout,
    TrainStepRequest,
    TrainStepResult,
)
from rlcore.spi.arrays import Float32Array
from rlcore.testing.conformance.fixtures import entry_of
from rlcore.testing.conformance.tensors import Values, collect

NUM_RANKS = 2
ItemT = TypeVar("ItemT")
Shares: TypeAlias = tuple[tuple[TokenBatch, ...], tuple[TokenBatch, ...]]
"""The microbatches of a step for each of two data-parallel ranks, equally many."""


@frozen(kw_only=True, eq=False)
class SharedStep:
    """A step of two ranks."""

    request: TrainStepRequest
    """That of one rank which has all the microbatches."""
    shares: Shares

    def of(self, layout: TrainerLayout) -> TrainStepRequest:
        """A rank's request."""
        return evolve(self.request, microbatches=share_of(self.shares, layout))


@frozen(kw_only=True, eq=False)
class RankJob:
    """What a rank needs to know; it travels to another process."""

    provider: Provider
    config: Any
    context: TrainerContext
    rendezvous: str
    directory: Path
    """Empty: for the checkpoint, and for each rank's report in `report-<rank>`."""
    steps: tuple[SharedStep, ...]
    """One after the other, at the versions 0, 1, 2; the last is made twice, from the same checkpoint."""
    poisoned: SharedStep
    """A step at version 1 that has to be refused, since one rank's loss is not finite."""
    bounded: SharedStep | None
    """A step at version 1 that has to be refused, since the ranks' metrics together exceed a bound; None without bounds."""


@frozen(kw_only=True, eq=False)
class RankReport:
    """What a rank saw."""

    layout: TrainerLayout
    logprobs: tuple[Float32Array, ...]
    """Of the first step's microbatches of this rank, before it."""
    reference: tuple[Float32Array, ...] | None
    """The same under the reference policy, after all steps."""
    results: tuple[TrainStepResult, ...]
    weights: tuple[Values, ...]
    """After each step."""
    refusals: dict[str, str] = field(factory=dict)
    """What the steps that had to be refused came to: the error's class, or "taken"."""


def play(rank: int, job: RankJob, barrier: Any) -> None:
    """The whole script on one rank; its report is pickled into job.directory."""
    entry = entry_of("trainer", job.provider, job.context.place.device)
    place = RankSpec(
        rank=rank, world_size=NUM_RANKS, local_rank=rank, device=job.context.place.device, rendezvous=job.rendezvous
    )
    handle = build_trainer(entry, evolve(job.context, place=place), job.config)
    try:
        report = _play(handle, job, barrier)
    finally:
        handle.close()
    (job.directory / f"report-{rank}").write_bytes(pickle.dumps(report))


def _play(handle: TrainerHandle, job: RankJob, barrier: Any) -> RankReport:
    results, weights, refusals = [], [], {}
    own = share_of(job.steps[0].shares, handle.layout)
    temperature = job.steps[0].request.temperature
    logprobs = handle.get_logprobs(logprobs_request(own, "policy", temperature, 0)).logprobs
    for step in job.steps[:-1]:
        results.append(handle.train_step(step.of(handle.layout)))
        weights.append(_weights(handle))
        if len(results) == 1:
            refusals["not finite"] = _refusal(handle, job.poisoned)
            if job.bounded is not None:
                refusals["over a bound"] = _refusal(handle, job.bounded)
    state = job.directory / "state"
    state.mkdir(exist_ok=True)
    handle.save_state(SaveStateRequest(directory=state, kind="resume"))
    barrier.wait()  # the core loads only when all ranks have saved
    for _ in range(2):
        results.append(handle.train_step(job.steps[-1].of(handle.layout)))
        weights.append(_weights(handle))
        handle.load_state(LoadStateRequest(directory=state))
    reference = None
    if job.context.needs_reference:
        request = logprobs_request(own, "reference", temperature, len(job.steps) - 1)
        reference = handle.get_logprobs(request).logprobs
    return RankReport(
        layout=handle.layout,
        logprobs=logprobs,
        reference=reference,
        results=tuple(results),
        weights=tuple(weights),
        refusals=refusals,
    )


def _refusal(handle: TrainerHandle, step: SharedStep) -> str:
    try:
        handle.train_step(step.of(handle.layout))
    except (BoundError, NonFiniteError) as error:
        return type(error).__name__
    return "taken"


def _weights(handle: TrainerHandle) -> Values:
    version = handle.weight_version
    assert version is not None
    request = ExportWeightsRequest(weight_version=version, dtype="float32", max_bucket_bytes=1 << 14)
    return collect(handle.export_weights(request))


def share_of(shares: tuple[tuple[ItemT, ...], tuple[ItemT, ...]], layout: TrainerLayout) -> tuple[ItemT, ...]:
    """A rank's microbatches, or what belongs to them: its own, or all where the ranks are one data-parallel rank."""
    if layout.data_parallel_size == 1:
        return shares[0] + shares[1]
    return shares[layout.data_parallel_rank]


def logprobs_request(
    microbatches: tuple[TokenBatch, ...], model: Any, temperature: float, weight_version: int
) -> LogprobsRequest:
    """Log-probabilities without the entropy."""
    return LogprobsRequest(
        microbatches=microbatches, model=model, temperature=temperature, entropy=False, weight_version=weight_version
    )
