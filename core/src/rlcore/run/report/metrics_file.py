"""metrics.jsonl: a JSON object for each step, and another where figures of a step come later; read back as one."""

import json
from collections.abc import Mapping
from os.path import lexists
from pathlib import Path

from rlcore.files import storage_errors
from rlcore.reading import parse_json, read_bytes
from rlcore.spi import CheckpointError

LATER = "eval/"
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
