"""The format "trl": `prompt` and `completion`, `chosen` and `rejected`, or `messages`. Its fields are rlcore's own.

Source of the layout: TRL, docs/source/dataset_formats.md.
"""

from typing import Any

from rlcore_text.formats.layout import Fields, Use, has_all, is_list, of_chat, without
from rlcore_text.formats.verl import is_of_rewards


def convert(row: Fields, use: Use) -> dict[str, Any] | None:
    """Convert a row of TRL's; see `layout`."""
    if use == "preferences":
        is_pair = has_all(row, "chosen", "rejected") and (
            "prompt" in row or (is_list(row["chosen"]) and is_list(row["rejected"]))
        )
        return dict(row) if is_pair else None
    if use == "demonstrations":
        return dict(row) if has_all(row, "messages") or has_all(row, "prompt", "completion") else None
    if "prompt" in row:
        return None if is_of_rewards(row) else dict(row)
    return of_chat(without(row, "messages"), row["messages"], use) if has_all(row, "messages") else None
