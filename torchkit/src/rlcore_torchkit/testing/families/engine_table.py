"""The table of an engine's families in a page of Markdown, one for each device."""

import re
from collections import Counter
from collections.abc import Sequence

from rlcore_torchkit.testing.families.engine_outcome import EngineOutcome

_MAX_REASON = 120


def marks(command: str, device: str) -> tuple[str, str]:
    """Return the lines that enclose a device's table in a page."""
    return f"<!-- families on {device}: python -m {command} --write -->", f"<!-- end of families on {device} -->"


def summary(outcomes: Sequence[EngineOutcome]) -> str:
    """Return how many families have each verdict, in a line."""
    counts = ", ".join(f"{count} {verdict}" for verdict, count in Counter(one.verdict for one in outcomes).most_common())
    return f"{len(outcomes)} families: {counts}"


def written(page: str, outcomes: Sequence[EngineOutcome], head: str, command: str, device: str) -> str:
    """Return the page with the table of these outcomes between its marks. ValueError where it has no marks."""
    begin, end = marks(command, device)
    if begin not in page or end not in page:
        raise ValueError(f"found no {begin} with {end} after it in the page; expected both")
    lines = [begin, f"{head}. {summary(outcomes)}.", ""]
    lines += ["| model_type | verdict | distance | renamed or joined | computed by | reason |", "|---|---|---|---|---|---|"]
    lines += [_row(outcome) for outcome in sorted(outcomes, key=lambda one: one.model_type)]
    table = "\n".join((*lines, end))
    return re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: table, page, flags=re.DOTALL)


def _row(outcome: EngineOutcome) -> str:
    reason = " ".join(outcome.reason.split()).replace("|", "\\|")[:_MAX_REASON].replace("<", "&lt;")
    distance = "" if outcome.distance is None else f"{outcome.distance:.0e}"
    if distance and outcome.dtype != "float32":
        distance += f" in {outcome.dtype}"
    changed = f"{outcome.num_changed} of {outcome.num_tensors}" if outcome.num_tensors else ""
    columns = (outcome.model_type, outcome.verdict, distance, changed, outcome.implementation, reason)
    return "| " + " | ".join(columns) + " |"
