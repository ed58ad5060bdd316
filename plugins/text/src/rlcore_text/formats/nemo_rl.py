"""The format "nemo-rl": `input` and `output`, `messages`, or `context` with ranked `completions`.

Source of the layout: NeMo-RL, docs/guides/sft.md and docs/guides/dpo.md. A lower rank is better. The best and the worst of
several completions make a pair.
"""

from collections.abc import Mapping
from typing import Any

from rlcore.schema.types import is_number
from rlcore.spi import DataError
from rlcore_text.formats.layout import Fields, Use, assistant, has_all, is_list, of_chat, user, without


def convert(row: Fields, use: Use) -> dict[str, Any] | None:
    """Convert a row of NeMo-RL's; see `layout`."""
    if use == "preferences":
        return _pair(row) if has_all(row, "context", "completions") else None
    if "prompt" in row:
        return None
    if has_all(row, "messages"):
        return of_chat(without(row, "messages"), row["messages"], use)
    if "instruction" in row or not all(isinstance(row.get(name), str) for name in ("input", "output")):
        return None
    return of_chat(without(row, "input", "output"), [user(row["input"]), assistant(row["output"])], use)


def _pair(row: Fields) -> dict[str, Any]:
    """Return a row of ranked completions as a preference."""
    ranked: Any = row["completions"]
    is_ranked = is_list(ranked) and all(
        isinstance(one, Mapping) and is_number(one.get("rank")) and is_list(one.get("completion")) for one in ranked
    )
    if not is_ranked or len(ranked) < 2 or len({one["rank"] for one in ranked}) < 2:
        raise DataError(
            f"{ranked!r:.80} as 'completions'; expected two or more, each with its rank and completion, of two ranks"
        )
    best, worst = min(ranked, key=lambda one: one["rank"]), max(ranked, key=lambda one: one["rank"])
    return {
        **without(row, "context", "completions"),
        "prompt": row["context"],
        "chosen": best["completion"],
        "rejected": worst["completion"],
    }
