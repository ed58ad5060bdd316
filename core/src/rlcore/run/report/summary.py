"""A run's final figures, from its metrics."""

from collections.abc import Mapping, Sequence

import numpy as np

from rlcore.run.report.timing import STEP_PHASES

MEASURED = {"accuracy": "eval/pass@1", "held_out_loss": "eval/loss"}
"""Metrics that the summary gives of the first and the last evaluation, by their prefixes there."""


def summarize(records: Sequence[Mapping[str, float]]) -> dict[str, object]:
    """`accuracy_before` and `accuracy_after` (first and last pass@1), likewise `held_out_loss_…`, medians of the step times,
    the last step's figures.

    `records` are the lines of metrics.jsonl, of this run and of those it resumed.
    """
    steps = [record for record in records if "time/total_s" in record]
    summary: dict[str, object] = {}
    for label, name in MEASURED.items():
        if measured := [record[name] for record in records if name in record]:
            summary |= {f"{label}_before": measured[0], f"{label}_after": measured[-1]}
    if steps:
        parts = ("total", *STEP_PHASES, "other")
        summary["steps"] = int(steps[-1]["step"])
        summary["step_time_median_s"] = {name: float(np.median([step[f"time/{name}_s"] for step in steps])) for name in parts}
        summary["seconds_by_phase"] = {name: float(sum(step[f"time/{name}_s"] for step in steps)) for name in parts}
        summary["tokens_per_second_median"] = float(np.median([step["tokens_per_second"] for step in steps]))
        summary["last_step"] = {name: value for name, value in steps[-1].items() if not name.startswith("time/")}
    return summary
