"""The figure of benchmarks/real_model.py: the mean of each side's runs, in a band from the lowest to the highest."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = {"fsdp2": "#4c78a8", "megatron": "#f58518", "trl": "#54a24b"}
LABELS = {"fsdp2": "rlcore, fsdp2", "megatron": "rlcore, megatron", "trl": "TRL"}


def read_records(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """The runs of each side that have been evaluated, in the order of their seeds."""
    found: dict[str, list[dict[str, Any]]] = {}
    for side in COLOURS:
        records = [json.loads(file.read_text()) for file in sorted(directory.glob(f"{side}-*.json"))]
        if records:
            found[side] = records
    return found


def points(runs: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[float], list[list[float]]]:
    """Steps that all runs have been evaluated at, their mean seconds, and the scores of the runs at each."""
    length = min(len(run["held_out"]) for run in runs)
    columns = [[run["held_out"][place] for run in runs] for place in range(length)]
    seconds = [sum(one["seconds"] for one in column) / len(column) for column in columns]
    return [column[0]["step"] for column in columns], seconds, [[one["score"] for one in column] for column in columns]


def draw(records: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Held-out scores over steps, and over the seconds of the steps."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "rlcore"  # the same curves make the same file
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for side, runs in records.items():
        steps, seconds, scores = points(runs)
        for axes, places in ((by_step, steps), (by_time, seconds)):
            axes.fill_between(
                places, list(map(min, scores)), list(map(max, scores)), color=COLOURS[side], alpha=0.2, linewidth=0
            )
            axes.plot(places, [sum(values) / len(values) for values in scores], color=COLOURS[side], label=LABELS[side])
    for axes, title in ((by_step, "step"), (by_time, "seconds of steps")):
        axes.set(xlabel=title)
        axes.grid(alpha=0.3)
    by_step.set(ylabel="held-out score")
    by_step.legend()
    figure.savefig(path, metadata={"Date": None})
