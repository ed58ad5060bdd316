"""A run's final figures, from its metrics."""

from rlcore.run.report.metrics_file import summarize
from rlcore.run.report.timing import STEP_PHASES

PARTS = ("total", *STEP_PHASES, "other")


def step(number: int, seconds: float, **figures: float) -> dict[str, float]:
    return {"step": number, **{f"time/{name}_s": seconds for name in PARTS}, "tokens_per_second": 10.0 * seconds, **figures}


def test_nothing_measured_is_nothing_said() -> None:
    assert summarize([]) == {}


def test_accuracy_is_that_of_the_first_and_the_last_evaluation() -> None:
    records = [{"step": 0, "eval/pass@1": 0.25}, step(1, 1.0), step(2, 1.0, **{"eval/pass@1": 0.5}), step(3, 1.0)]
    summary = summarize(records)
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.25, 0.5)
    assert summary["steps"] == 3


def test_the_held_out_loss_is_that_of_the_first_and_the_last_evaluation() -> None:
    summary = summarize([{"step": 0, "eval/loss": 3.0}, step(1, 1.0, loss=2.5, **{"eval/loss": 2.0})])
    assert (summary["held_out_loss_before"], summary["held_out_loss_after"]) == (3.0, 2.0)
    assert "accuracy_before" not in summary


def test_times_are_medians_and_sums_over_the_steps() -> None:
    summary = summarize([{"step": 0, "eval/pass@1": 0.0}, step(1, 9.0), step(2, 1.0), step(3, 2.0)])
    assert summary["step_time_median_s"] == dict.fromkeys(PARTS, 2.0)
    assert summary["seconds_by_phase"] == dict.fromkeys(PARTS, 12.0)
    assert summary["tokens_per_second_median"] == 20.0


def test_the_last_steps_figures_are_kept_without_its_times() -> None:
    assert summarize([step(1, 1.0, loss=3.0), step(2, 1.0, loss=2.0)])["last_step"] == {
        "step": 2,
        "tokens_per_second": 10.0,
        "loss": 2.0,
    }
    assert "accuracy_before" not in summarize([step(1, 1.0)])
