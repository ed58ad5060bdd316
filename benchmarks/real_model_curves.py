"""The figure of benchmarks/real_model.py: the mean of each side's runs, in a band from the lowest to the highest."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from real_model_sides import SIDES, run_name

LABELS = {"fsdp2": "rlcore, fsdp2", "megatron": "rlcore, megatron", "trl": "TRL"}
VARIANTS = (("megatron", "trl", "staleness 1", "staleness 4", "8 bits", "adapters"), ("DAPO", "GSPO", "RLOO", "Dr.GRPO"))
"""Sides of each half of the second figure: kinds of run, and algorithms. `fsdp2` is beside both."""
COLOURS = {"fsdp2": "#4c78a8", "megatron": "#f58518", "trl": "#54a24b"}


def read_records(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """The runs of each side that have been evaluated, in the order of their seeds."""
    found: dict[str, list[dict[str, Any]]] = {}
    for side in SIDES:
        files = sorted(directory.glob(run_name(side, 0)[:-1] + "[0-9]*.json"))
        if files:
            found[side] = [json.loads(file.read_text()) for file in files]
    return found


def points(runs: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[float], list[list[float]]]:
    """Steps that all runs have been evaluated at, their mean seconds, and the scores of the runs at each."""
    length = min(len(run["held_out"]) for run in runs)
    columns = [[run["held_out"][place] for run in runs] for place in range(length)]
    seconds = [sum(one["seconds"] for one in column) / len(column) for column in columns]
    return [column[0]["step"] for column in columns], seconds, [[one["score"] for one in column] for column in columns]


def draw(records: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Held-out scores of both trainers and of TRL over steps, and over the seconds of the steps."""
    figure, (by_step, by_time) = _axes("step", "seconds of steps")
    for side in (name for name in LABELS if name in records):
        steps, seconds, scores = points(records[side])
        for axes, places in ((by_step, steps), (by_time, seconds)):
            _band(axes, places, scores, LABELS[side], COLOURS[side])
    by_step.legend()
    figure.savefig(path, metadata={"Date": None})


def draw_variants(records: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """The same of other kinds of run, and of other algorithms, over steps and beside the band of `fsdp2`."""
    figure, both = _axes("step", "step")
    for axes, sides in zip(both, VARIANTS, strict=True):
        for number, side in enumerate(name for name in ("fsdp2", *sides) if name in records):
            steps, _, scores = points(records[side])
            _band(axes, steps, scores, side, f"C{number}")
        axes.legend()
    figure.savefig(path, metadata={"Date": None})


def _axes(*titles: str) -> tuple[Any, Any]:
    """A figure of two parts that share the axis of scores."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "rlcore"  # the same curves make the same file
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    both = figure.subplots(1, 2, sharey=True)
    for axes, title in zip(both, titles, strict=True):
        axes.set(xlabel=title)
        axes.grid(alpha=0.3)
    both[0].set(ylabel="held-out score")
    return figure, both


def _band(axes: Any, places: Sequence[float], scores: Sequence[Sequence[float]], label: str, colour: str) -> None:
    axes.fill_between(places, list(map(min, scores)), list(map(max, scores)), color=colour, alpha=0.15, linewidth=0)
    axes.plot(places, [sum(values) / len(values) for values in scores], color=colour, label=label)
