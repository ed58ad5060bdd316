"""A step in pieces, by forward_backward and optim_step, as the result of one train_step."""

from collections.abc import Sequence
from typing import Any, Protocol

from attrs import evolve

from rlcore.spi import (
    ForwardBackwardRequest,
    ForwardBackwardResult,
    OptimStepRequest,
    OptimStepResult,
    TokenBatch,
    TrainStepRequest,
    TrainStepResult,
)


class SplitTrainer(Protocol):
    """A trainer's handle, or its backend."""

    def forward_backward(self, request: ForwardBackwardRequest) -> ForwardBackwardResult: ...
    def optim_step(self, request: OptimStepRequest) -> OptimStepResult: ...


def piece_of(step: TrainStepRequest, batches: tuple[TokenBatch, ...], piece: int) -> ForwardBackwardRequest:
    """The request for a piece of a step that has these microbatches."""
    return ForwardBackwardRequest(
        microbatches=batches,
        counts=step.counts,
        loss=step.loss,
        temperature=step.temperature,
        weight_version=step.weight_version,
        piece=piece,
        logprobs=step.logprobs,
    )


def step_in_pieces(
    trainer: SplitTrainer, step: TrainStepRequest, sizes: Sequence[int] = (), **settings: Any
) -> TrainStepResult:
    """Make a step in pieces of so many microbatches, by default of one each; `settings` are fields of OptimStepRequest.

    The metrics are sums over the pieces, so those that are maxima are wrong for more than one.
    """
    first, results = 0, list[ForwardBackwardResult]()
    for number, size in enumerate(sizes or [1] * len(step.microbatches)):
        request = piece_of(step, step.microbatches[first : first + size], number)
        results.append(trainer.forward_backward(request))
        first += size
    asked = {name: getattr(step, name) for name in ("weight_version", "schedule_step", "gradient_norms")}
    last = OptimStepRequest(pieces=len(results), **asked, **settings)
    update = trainer.optim_step(last)
    sums = {name: sum(result.metrics[name] for result in results) for name in results[0].metrics}
    return TrainStepResult(
        weight_version=update.weight_version,
        loss=sum(result.loss for result in results),
        grad_norm=update.grad_norm,
        learning_rate=update.learning_rate,
        metrics={**sums, **update.metrics},
        logprobs=tuple(one for result in results for one in result.logprobs or ()) if step.logprobs else None,
        gradient_norms=update.gradient_norms,
    )


def without_metrics(result: TrainStepResult) -> TrainStepResult:
    """The result without metrics, of which a step in pieces cannot tell sums from maxima."""
    return evolve(result, metrics={})
