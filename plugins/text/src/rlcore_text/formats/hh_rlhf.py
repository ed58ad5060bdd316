"""The format "hh-rlhf": `chosen` and `rejected` are dialogues as text.

A turn begins with an empty line and "Human:" or "Assistant:".

Source of the layout: the data card of Anthropic/hh-rlhf.
"""

import re
from itertools import pairwise
from typing import Any

from rlcore.spi import DataError
from rlcore_text.formats.layout import Fields, Use, assistant, of_chat, user, without

_TURN = re.compile(r"\n\n(Human|Assistant):")


def convert(row: Fields, use: Use) -> dict[str, Any] | None:
    """Convert a row of hh-rlhf's; see `layout`."""
    sides = ("chosen", "rejected")
    if "prompt" in row or not all(isinstance(text := row.get(side), str) and _TURN.match(text) for side in sides):
        return None
    if use == "preferences":
        return {**row, **{side: _dialogue(row[side]) for side in sides}}
    return of_chat(without(row, *sides), _dialogue(row["chosen"]), use)


def _dialogue(text: str) -> list[dict[str, Any]]:
    """Return the messages of a dialogue. DataError where two turns in a row have one speaker."""
    speakers, said = _TURN.findall(text), [one.strip() for one in _TURN.split(text)[2::2]]
    if any(one == other for one, other in pairwise(speakers)):
        raise DataError(
            f"a dialogue with two turns in a row of one speaker, {text!r:.60}; expected Human and Assistant by turns"
        )
    return [user(one) if speaker == "Human" else assistant(one) for speaker, one in zip(speakers, said, strict=True)]
