"""Rewards and held-out accuracies of the demo under several settings, in one figure; a thin line for each seed.

    for seed in 0 1 2; do
        python demo/run.py --seed $seed --trainer fsdp2 --directory runs/fsdp2
        python demo/run.py --seed $seed --trainer megatron --directory runs/megatron
    done
    python benchmarks/trainer_curves.py docs/trainers.svg fsdp2=runs/fsdp2 megatron=runs/megatron

The first three sides are whole lines of three colours, the next three dashed, the last three dotted. Rewards are means over ten
steps.
"""

import argparse
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

COLOURS = ("#4c78a8", "#f58518", "#54a24b")
STYLES = ("-", "--", ":")
WINDOW = 10


def records(directory: Path) -> list[list[dict[str, Any]]]:
    """Of each seed's GRPO run."""
    files = sorted(directory.glob("demo-seed*/grpo/metrics.jsonl"))
    if not files:
        raise SystemExit(f"{directory}: found no demo-seed*/grpo/metrics.jsonl")
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def points(run: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps and values, where the record has it."""
    having = [record for record in run if key in record]
    return [record["step"] for record in having], [record[key] for record in having]


def draw(sides: dict[str, Path]) -> Figure:
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    rewards, accuracies = figure.subplots(1, 2)
    for (label, directory), (style, colour) in zip(sides.items(), product(STYLES, COLOURS), strict=False):
        for number, run in enumerate(records(directory)):
            options: dict[str, Any] = {"color": colour, "linestyle": style, "linewidth": 1.2}
            options |= {"label": label} if number == 0 else {}
            steps, values = points(run, "reward_mean")
            rewards.plot(steps[WINDOW - 1 :], np.convolve(values, np.full(WINDOW, 1 / WINDOW), "valid"), **options)
            accuracies.plot(*points(run, "evaluation/pass@1"), **options)
    for axes, title in ((rewards, "mean reward"), (accuracies, "held-out pass@1")):
        axes.set(title=title, xlabel="step", ylim=(0.2, 1.02))
        axes.grid(alpha=0.3)
    accuracies.legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="an .svg or .png file")
    parser.add_argument("sides", nargs="+", metavar="LABEL=DIRECTORY")
    arguments = parser.parse_args()
    mpl.rcParams["svg.hashsalt"] = "rlcore"  # the same curves make the same file
    sides = dict(side.split("=", 1) for side in arguments.sides)
    if len(sides) > len(STYLES) * len(COLOURS):
        parser.error(f"found {len(sides)} sides; expected at most {len(STYLES) * len(COLOURS)}")
    draw({label: Path(directory) for label, directory in sides.items()}).savefig(arguments.output, metadata={"Date": None})


if __name__ == "__main__":
    main()
