"""The table of an engine's families in a page of Markdown, one for each device."""

import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence

from rlcore_torchkit.testing.families.engine_outcome import EngineOutcome

_MAX_REASON = 200
"""Characters of a reason; a longer one is cut between words."""


def marks(command: str, device: str) -> tuple[str, str]:
    """Return the lines that enclose a device's table in a page."""
    return f"<!-- families on {device}: python -m {command} --write -->", f"<!-- end of families on {device} -->"


def summary(outcomes: Sequence[EngineOutcome]) -> str:
    """Return how many families have each verdict, in a line."""
    counts = ", ".join(f"{count} {verdict}" for verdict, count in Counter(one.verdict for one in outcomes).most_common())
    return f"{len(outcomes)} families: {counts}"


def require_marks(page: str, command: str, device: str) -> None:
    """Raise ValueError where a page has no marks of a device's table."""
    begin, end = marks(command, device)
    if begin not in page or end not in page.partition(begin)[2]:
        raise ValueError(f"found no {begin} with {end} after it in the page; expected both")


def written(
    page: str, outcomes: Sequence[EngineOutcome], head: str, command: str, device: str, reasons: Mapping[str, str]
) -> str:
    """Return the page with the table of these outcomes between its marks. ValueError where it has no marks.

    `reasons` are the words for an engine's own errors, by a regular expression that such an error contains.
    """
    require_marks(page, command, device)
    begin, end = marks(command, device)
    lines = [begin, f"{head}. {summary(outcomes)}.", "", "| family | verdict | distance | reason |", "|---|---|---|---|"]
    lines += [_row(outcome, reasons) for outcome in sorted(outcomes, key=lambda one: one.model_type)]
    table = "\n".join((*lines, end))
    return re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: table, page, flags=re.DOTALL)


def _row(outcome: EngineOutcome, reasons: Mapping[str, str]) -> str:
    own = textwrap.shorten(outcome.reason, _MAX_REASON, placeholder=" …")
    words = next((text for pattern, text in reasons.items() if re.search(pattern, outcome.reason)), own)
    reason = words.replace("|", "\\|").replace("<", "&lt;")
    distance = "" if outcome.distance is None else f"{outcome.distance:.0e}"
    if distance and outcome.dtype != "float32":
        distance += f" in {outcome.dtype}" + ("" if outcome.mean is None else f", mean {outcome.mean:.0e}")
    return "| " + " | ".join((outcome.model_type, outcome.verdict, distance, reason)) + " |"
