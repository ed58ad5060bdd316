"""The format "sharegpt": `conversations` of `from` and `value`, or of `role` and `content`, with `system` and `tools`.

Source of the layout: LLaMA-Factory, data/README.md, where preferences have one message as `chosen` and one as `rejected`.
"""

from collections.abc import Mapping
from typing import Any

from rlcore_text.formats.layout import Fields, Use, has_all, is_list, of_chat, with_system, without


def convert(row: Fields, use: Use) -> dict[str, Any] | None:
    """Convert a row of ShareGPT's; see `layout`."""
    said = row.get("conversations")
    if not is_list(said) or not said or (use == "rollouts" and "prompt" in row):
        return None
    others = without(row, "conversations", "system")
    messages = with_system(row.get("system"), list(said))
    if use != "preferences":
        return of_chat(others, messages, use)
    if not has_all(row, "chosen", "rejected") or not all(isinstance(row[name], Mapping) for name in ("chosen", "rejected")):
        return None
    return {**others, "prompt": messages, "chosen": [row["chosen"]], "rejected": [row["rejected"]]}
