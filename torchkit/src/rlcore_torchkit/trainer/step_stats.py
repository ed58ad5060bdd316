"""Measurements of an optimizer step, and the checks by which a trainer refuses the step."""

import math
from collections.abc import Callable, Mapping, Sequence

from attrs import frozen

from rlcore.schema.suggestions import listed
from rlcore.spi.arrays import Float32Array
from rlcore.spi.errors import BoundError, ContractError, NonFiniteError
from rlcore.spi.trainer import TrainStepResult

_REFUSED = "the step is refused and the state before it kept"


@frozen(kw_only=True)
class StepStats:
    """Totals over all ranks, equal on each, so that all of them raise or none."""

    loss: float
    grad_norm: float
    metrics: Mapping[str, float]

    def result(
        self,
        *,
        weight_version: int,
        learning_rate: float,
        logprobs: tuple[Float32Array, ...] | None,
        gradient_norms: Mapping[str, float] | None = None,
    ) -> TrainStepResult:
        """The answer to a request: these totals, the version that the step made, each microbatch's log-probabilities, and each
        tensor's norm."""
        return TrainStepResult(
            weight_version=weight_version,
            loss=self.loss,
            grad_norm=self.grad_norm,
            learning_rate=learning_rate,
            metrics=self.metrics,
            logprobs=logprobs,
            gradient_norms=gradient_norms,
        )


def check_state(hook: str, found: int, held: int, *, failed_midway: bool) -> None:
    """Raise ContractError unless a request names the version `held`, and no earlier step left gradients behind."""
    if found != held:
        raise ContractError(f"{hook}: found weight_version {found}; expected {held}, the one held")
    if failed_midway:
        raise ContractError(f"{hook}: an earlier step failed between microbatches; build the trainer anew")


def check_finite(
    stats: StepStats, weight_version: int, non_finite_names: Callable[[], Sequence[str]] = list, *, hook: str = "train_step"
) -> None:
    """Raise NonFiniteError where one of them is not finite; `non_finite_names` says which parameters' gradients are not."""
    where = f"{hook} at weight version {weight_version}"
    if not math.isfinite(stats.loss):
        raise NonFiniteError(f"{where}: the loss is {stats.loss}; {_REFUSED}")
    if not math.isfinite(stats.grad_norm):
        names = non_finite_names()
        of = f" in {listed(names)}" if names else ""
        raise NonFiniteError(f"{where}: the gradient's norm is {stats.grad_norm}, not finite{of}; {_REFUSED}")
    for name, value in stats.metrics.items():
        if not math.isfinite(value):
            raise NonFiniteError(f"{where}: the metric {name} is {value}; {_REFUSED}")


def check_bounds(stats: StepStats, bounds: Mapping[str, float], weight_version: int) -> None:
    """Raise BoundError where a metric exceeds its bound. A metric that the loss does not report has none."""
    exceeded = {name: value for name, value in stats.metrics.items() if value > bounds.get(name, math.inf)}
    if exceeded:
        shown = ", ".join(f"the metric {name} is {value:.6g}, above {bounds[name]:.6g}" for name, value in exceeded.items())
        raise BoundError(f"train_step at weight version {weight_version}: {shown}; {_REFUSED}", exceeded)
