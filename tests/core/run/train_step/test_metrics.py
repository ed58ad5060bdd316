"""How the figures of a step's updates become the step's."""

from rlcore.run.train_step.metrics import training_metrics
from rlcore.spi import TrainStepResult


def result(version: int, **metrics: float) -> TrainStepResult:
    return TrainStepResult(weight_version=version, loss=float(version), grad_norm=2.0, learning_rate=0.1, metrics=metrics)


def test_means_maxima_and_what_only_some_updates_report() -> None:
    metrics = training_metrics(
        [
            result(1, token_mult_prob_error=1.25, ratio_max=1.5, clip_fraction=0.0),
            result(2, ratio_max=3.0, clip_fraction=0.5),
            result(3, ratio_max=2.0, entropy=0.75),
        ]
    )
    assert metrics == {
        "loss": 2.0,
        "grad_norm": 2.0,
        "learning_rate": metrics["learning_rate"],
        "token_mult_prob_error": 1.25,
        "ratio_max": 3.0,
        "clip_fraction": 0.25,
        "entropy": 0.75,
    }


def test_a_step_without_updates_has_none() -> None:
    assert training_metrics([]) == {}
