"""The format "openai": lines for OpenAI's fine-tuning of chats, of preferences and by graders.

Source of the layout: the guides of OpenAI's API to supervised, direct preference and reinforcement fine-tuning.
"""

from collections.abc import Mapping
from typing import Any

from rlcore_text.formats.layout import Fields, Use, has_all, of_chat, without


def convert(row: Fields, use: Use) -> dict[str, Any] | None:
    """Convert a row of OpenAI's; see `layout`."""
    if use != "preferences":
        if not has_all(row, "messages") or "prompt" in row:
            return None
        return of_chat(without(row, "messages"), row["messages"], use)
    asked = row.get("input")
    if not has_all(row, "preferred_output", "non_preferred_output") or not isinstance(asked, Mapping):
        return None
    return {
        **without(row, "input", "preferred_output", "non_preferred_output"),
        **without(asked, "messages"),
        "prompt": asked.get("messages"),
        "chosen": row["preferred_output"],
        "rejected": row["non_preferred_output"],
    }
