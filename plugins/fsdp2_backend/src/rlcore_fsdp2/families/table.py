"""The table of families in a page of Markdown, and its counts."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from rlcore_fsdp2.families.outcome import Outcome

BEGIN, END = "<!-- families: python -m rlcore_fsdp2.families --write docs/models.md -->", "<!-- end of families -->"
_MAX_REASON = 120


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return how many families were tried, and how many have each verdict, in a line."""
    pairs = Counter((outcome.trainer, outcome.generator) for outcome in outcomes)
    counts = ", ".join(f"{count} {trainer} and {generator}" for (trainer, generator), count in pairs.most_common())
    return f"{len(outcomes)} families, trainer and generator: {counts}"


def written(page: str, outcomes: Sequence[Outcome]) -> str:
    """Return the page with the table of these outcomes between its marks. ValueError where it has no marks."""
    if BEGIN not in page or END not in page:
        raise ValueError(f"found no {BEGIN} with {END} after it in the page; expected both")
    table = "\n".join((BEGIN, *_lines(outcomes), END))
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: table, page, flags=re.DOTALL)


def _lines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    from transformers import __version__

    yield f"transformers {__version__}, {datetime.now(tz=UTC):%Y-%m-%d}. {summary(outcomes)}."
    yield ""
    yield "| model_type | `fsdp2` | computed by | `transformers` | reason |"
    yield "|---|---|---|---|---|"
    for outcome in outcomes:
        reason = " ".join((outcome.trainer_reason or outcome.generator_reason).split()).replace("|", "\\|")[:_MAX_REASON]
        yield f"| {outcome.model_type} | {outcome.trainer} | {outcome.way} | {outcome.generator} | {reason} |"
