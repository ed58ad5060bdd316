"""The bundles and receipts of a run, for its page."""

import math
from pathlib import Path
from typing import Any

from rlcore.reading import read_json
from rlcore.registry.plugin_errors import first_line
from rlcore.run.storage.run_directory import step_of
from rlcore.spi import CheckpointError
from rlcore_report.curves import rounded

MIB = 2**20


def proofs(run: Path) -> list[dict[str, Any]]:
    """Each step with a bundle or a receipt, ascending. A damaged file is a finding of its step."""
    bundles = {step: path for path in (run / "bundles").glob("step-*") if (step := step_of(path)) is not None}
    receipts = {
        step: path for path in (run / "receipts").glob("step-*.json") if (step := step_of(path.with_suffix(""))) is not None
    }
    return [
        {"step": step, "bundle": _bundle(bundles.get(step)), "receipt": _receipt(receipts.get(step))}
        for step in sorted(bundles.keys() | receipts.keys())
    ]


def _bundle(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    found = {"path": str(path.absolute()), "name": f"bundles/{path.name}"}
    try:
        header = read_json(path / "bundle.json")
        size = sum(int(file["bytes"]) for file in header["files"].values())
        return found | {"alarm": str(header["alarm"]), "weights": str(header["weights"]), "mib": rounded(size / MIB)}
    except (CheckpointError, LookupError, TypeError, ValueError, AttributeError) as error:
        return found | {"alarm": f"damaged: {first_line(error)}", "weights": "", "mib": None}


def _receipt(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    found: dict[str, Any] = {"path": str(path.absolute()), "name": f"receipts/{path.name}", "trainer": None, "generation": None}
    try:
        record = read_json(path)
        if "failure" in record:
            return found | {"finding": f"failed: {record['failure']}"}
        given = {part: float(record[part]["mean"]) for part in ("trainer", "generation") if record[part] is not None}
        means = {part: rounded(mean) for part, mean in given.items() if math.isfinite(mean)}
        return found | means | {"finding": str(record["finding"])}
    except (CheckpointError, LookupError, TypeError, ValueError) as error:
        return found | {"finding": f"damaged: {first_line(error)}"}
