"""The record of each step and each refit of a run with receipts, one JSON object a line.

steps.jsonl   step, weight_version, num_tokens, and the tokens of each version of the weights that sampled them
refits.jsonl  version, num_tensors, and a SHA-256 over the names and digests that the generator has acknowledged
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlcore.files import storage_errors, write_atomically
from rlcore.reading import parse_json, read_bytes
from rlcore.run.protocols import TrainedStep
from rlcore.spi import WEIGHT_VERSIONS, CheckpointError

STEPS, REFITS = "steps.jsonl", "refits.jsonl"


def described_step(step: TrainedStep) -> dict[str, Any]:
    """The line of a step."""
    batch, versions = step.sampled.batch, {}
    if WEIGHT_VERSIONS in batch.token_columns:
        found, counts = np.unique(batch.token_columns[WEIGHT_VERSIONS][batch.loss_mask], return_counts=True)
        versions = {str(version): int(count) for version, count in zip(found.tolist(), counts.tolist(), strict=True)}
    return {
        "step": step.step,
        "weight_version": step.sampled.weight_version,
        "num_tokens": int(batch.loss_mask.sum()),
        "versions": versions,
    }


def described_refit(version: int, digests: Mapping[str, int]) -> dict[str, Any]:
    """The line of a refit."""
    text = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return {"version": version, "num_tensors": len(digests), "sha256": hashlib.sha256(text.encode()).hexdigest()}


def append(file: Path, record: Mapping[str, Any]) -> None:
    """Add a line. StorageError where that fails."""
    with storage_errors(file.name, file.parent):
        file.parent.mkdir(exist_ok=True)
        with file.open("a", encoding="utf-8") as opened:
            opened.write(json.dumps(record) + "\n")


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file, less a last line that a crash cut short. CheckpointError names a line that is none."""
    if not file.is_file():
        return
    *lines, _ = read_bytes(file).split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            found = parse_json(line)
        except ValueError:
            found = line.decode(errors="backslashreplace")[:60]
        if not isinstance(found, dict):
            raise CheckpointError(
                f"{file.name}, line {number}: found {found!r}; expected a JSON object. Remove the line of {file}"
            )
        yield found


def rewind(receipts: Path, step: int, weight_version: int) -> None:
    """Forget the lines of steps behind `step`, and of refits behind the version that it ended with: a resumed run makes them
    again."""
    for name, key, last in ((STEPS, "step", step), (REFITS, "version", weight_version)):
        if (receipts / name).is_file():
            kept = [line for line in read_lines(receipts / name) if line.get(key, 0) <= last]
            write_atomically(receipts / name, "".join(json.dumps(line) + "\n" for line in kept))
