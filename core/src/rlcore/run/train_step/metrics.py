"""The metrics of a step's updates."""

from collections.abc import Sequence

import numpy as np

from rlcore.spi import TrainStepResult


def step_metrics(result: TrainStepResult) -> dict[str, float]:
    """All figures of an update by their names in metrics.jsonl."""
    own = {"loss": result.loss, "grad_norm": result.grad_norm, "learning_rate": result.learning_rate}
    return {**own, **result.metrics}


def training_metrics(results: Sequence[TrainStepResult]) -> dict[str, float]:
    """Return the mean of each metric over the updates of a step that report it, and the greatest of `*_max`."""
    values: dict[str, list[float]] = {}
    for result in results:
        for name, value in step_metrics(result).items():
            values.setdefault(name, []).append(value)
    return {name: max(found) if name.endswith("_max") else float(np.mean(found)) for name, found in values.items()}
