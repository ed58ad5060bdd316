"""A run that displays are tried on: its figures and its summary, and its calls of a display."""

from pathlib import Path

STEP = {
    "reward_mean": 0.5,
    "loss": 0.25,
    "response_length_mean": 7.25,
    "tokens_per_second": 1234.5,
    "time/total_s": 2.0,
    "time/generation_s": 1.25,
    "time/train_s": 0.5,
    "time/refit_s": 0.001,
    "time/other_s": 0.249,
}
PHASES = ("total", "generation", "rewards", "logprobs", "train", "refit", "other")
SUMMARY = {
    "run_directory": "runs/demo",
    "accuracy_before": 0.25,
    "accuracy_after": 0.875,
    "step_time_median_s": dict.fromkeys(PHASES, 0.5) | {"rewards": 0.0},
    "seconds_by_phase": dict.fromkeys(PHASES, 10.0) | {"total": 40.0, "rewards": 0.0},
    "tokens_per_second_median": 1234.5,
    "total_s": 50.0,
    "setup_s": 5.0,
    "model": "runs/demo/model",
}


def drive(progress, directory: Path, num_steps: int = 3) -> None:
    """A whole run's events."""
    progress.phase("set-up")
    progress.started(directory, 0, num_steps)
    progress.phase("evaluation")
    progress.step(0, {"eval/pass@1": 0.25})
    for step in range(1, num_steps + 1):
        progress.phase("generation")
        progress.step(step, {**STEP, "reward_mean": step / num_steps})
    progress.note("step 3 has nothing to learn from")
    progress.finished({**SUMMARY, "run_directory": str(directory)})
