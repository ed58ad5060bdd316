"""The table of families in a page of Markdown, and its counts."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version

from rlcore_fsdp2.families.outcome import Outcome

BEGIN, END = "<!-- families: python -m rlcore_fsdp2.families --write docs/models.md -->", "<!-- end of families -->"
IMAGE_BEGIN = "<!-- models of images: python -m rlcore_fsdp2.families --images --write docs/models.md -->"
IMAGE_END = "<!-- end of models of images -->"
_MAX_REASON = 200
_ROW = re.compile(r"^\| ([\w-]+) \| ([\w ]+) \| .* \| ([\w ]+) \| .*\|$")
"""A row of a family: its model_type and the verdicts on trainer and generator."""
_HEAD = re.compile(r"transformers (\S+), (\S+)\. ")


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return how many families were tried, and how many have each verdict, in a line."""
    return _counts([(outcome.trainer, outcome.generator) for outcome in outcomes])


def written(page: str, outcomes: Sequence[Outcome]) -> str:
    """Return the page with the table of these outcomes between its marks. ValueError where it has no marks."""
    return _replaced(page, map(_row, outcomes), f"{datetime.now(tz=UTC):%Y-%m-%d}")


def merged(page: str, outcomes: Sequence[Outcome]) -> str:
    """Return the page with the rows of these outcomes replaced or added; the table keeps its date. ValueError where it has no
    marks, or its table is of another version of transformers."""
    table = page.partition(BEGIN)[2].partition(END)[0]
    head = _HEAD.search(table)
    if head is None or head[1] != version("transformers"):
        found = "no version" if head is None else f"transformers {head[1]}"
        raise ValueError(f"table: found {found}; expected transformers {version('transformers')}: write all families")
    rows = {match[1]: line for line in table.splitlines() if (match := _ROW.match(line)) and match[1] != "model_type"}
    rows |= {outcome.model_type: _row(outcome) for outcome in outcomes}
    return _replaced(page, (rows[name] for name in sorted(rows)), head[2])


def images_written(page: str, outcomes: Sequence[Outcome]) -> str:
    """Return the page with the table of models of images between its marks. ValueError where it has no marks."""
    if IMAGE_BEGIN not in page or IMAGE_END not in page:
        raise ValueError(f"found no {IMAGE_BEGIN} with {IMAGE_END} after it in the page; expected both")
    head = [f"transformers {version('transformers')}, {datetime.now(tz=UTC):%Y-%m-%d}. {image_summary(outcomes)}.", ""]
    head += ["| model_type | `fsdp2` | reason |", "|---|---|---|"]
    lines = [f"| {one.model_type} | {one.trainer} | {one.trainer_reason} |" for one in outcomes]
    table = "\n".join((IMAGE_BEGIN, *head, *lines, IMAGE_END))
    return re.sub(f"{re.escape(IMAGE_BEGIN)}.*?{re.escape(IMAGE_END)}", lambda _: table, page, flags=re.DOTALL)


def image_summary(outcomes: Sequence[Outcome]) -> str:
    """Return how many models of images were tried, and how many have each verdict, in a line."""
    counts = Counter(outcome.trainer for outcome in outcomes).most_common()
    return f"{len(outcomes)} classes: {', '.join(f'{count} {verdict}' for verdict, count in counts)}"


def _counts(verdicts: Sequence[tuple[str, str]]) -> str:
    counts = ", ".join(f"{count} {trainer} and {generator}" for (trainer, generator), count in Counter(verdicts).most_common())
    return f"{len(verdicts)} families, trainer and generator: {counts}"


def _replaced(page: str, rows: Iterable[str], date: str) -> str:
    if BEGIN not in page or END not in page:
        raise ValueError(f"found no {BEGIN} with {END} after it in the page; expected both")
    lines = list(rows)
    counts = _counts([(match[2], match[3]) for match in map(_ROW.match, lines) if match])
    head = [f"transformers {version('transformers')}, {date}. {counts}.", ""]
    head += ["| model_type | `fsdp2` | computed by | `transformers` | reason |", "|---|---|---|---|---|"]
    table = "\n".join((BEGIN, *head, *lines, END))
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: table, page, flags=re.DOTALL)


def _row(outcome: Outcome) -> str:
    given = f"with {outcome.options}" if outcome.options else ""
    reason = " ".join((outcome.trainer_reason or outcome.generator_reason or given).split())
    shown = reason.replace("|", "\\|")[:_MAX_REASON]
    return f"| {outcome.model_type} | {outcome.trainer} | {outcome.way} | {outcome.generator} | {shown} |"
