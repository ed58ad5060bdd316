"""metrics.jsonl: a JSON object for each step, and another where figures come later; read back as one, and summarised."""

import json
from collections.abc import Mapping, Sequence
from os.path import lexists
from pathlib import Path
from statistics import median

from rlcore.files import storage_errors
from rlcore.reading import parse_json, read_bytes
from rlcore.run.report.timing import STEP_PHASES
from rlcore.spi import CheckpointError

LATER = ("checkpoint_eval/", "receipts/")
"""How the names of figures begin that may come after those of later steps."""


def append_metrics(path: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Write a line of a step, which is on disk when this returns. Raises StorageError where it cannot be written."""
    with storage_errors(path.name, path.parent), path.open("a") as file:
        file.write(json.dumps({"step": step, **metrics}) + "\n")


def read_metrics_file(path: Path) -> list[dict[str, float]]:
    """Return the record of each step, in order. An incomplete last line is ignored; a missing file gives [].

    Raises CheckpointError that names every line which is not a step's figures.
    """
    if not lexists(path):
        return []
    *lines, rest = read_bytes(path).split(b"\n")
    records, problems, last = [], [], -1.0
    for number, line in enumerate([*lines, rest] if isinstance(_parse(rest), dict) else lines, start=1):
        record = _parse(line)
        if isinstance(record, str):
            problems.append(f"\n  - line {number}: found {record}")
            continue
        records.append(record)
        if not all(name == "step" or name.startswith(LATER) for name in record) or len(record) == 1:
            if record["step"] <= last:
                problems.append(f"\n  - line {number}: found step {record['step']} behind step {last:g}")
            last = record["step"]
    if problems:
        raise CheckpointError(
            f"{path} is damaged; expected one JSON object a line, with a whole number `step`, in order, and numbers as figures:"
            f"{''.join(problems)}\nRepair these lines, or remove them: each holds the figures of one step, which are lost then."
        )
    merged: dict[int, dict[str, float]] = {}
    for record in records:
        merged.setdefault(int(record["step"]), {}).update(record)
    return [merged[step] for step in sorted(merged)]


def _parse(line: bytes) -> dict[str, float] | str:
    """A step's figures, or what there is in their place."""
    shown = repr(line.decode(errors="backslashreplace"))
    shown = shown if len(shown) <= 60 else f"{shown[:60]}…"
    try:
        record = parse_json(line)
    except ValueError:  # no JSON, no UTF-8, or too deep
        return shown
    if not isinstance(record, Mapping) or type(record.get("step")) is not int or record["step"] < 0:
        return shown
    wrong = [
        name
        for name, value in record.items()
        if type(value) not in (int, float) or (type(value) is int and abs(value) >= 2**63)
    ]
    return f"{wrong[0]} = {record[wrong[0]]!r}" if wrong else dict(record)


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
        summary["step_time_median_s"] = {name: median(step[f"time/{name}_s"] for step in steps) for name in parts}
        summary["seconds_by_phase"] = {name: float(sum(step[f"time/{name}_s"] for step in steps)) for name in parts}
        summary["tokens_per_second_median"] = median(step["tokens_per_second"] for step in steps)
        summary["last_step"] = {name: value for name, value in steps[-1].items() if not name.startswith("time/")}
    return summary
