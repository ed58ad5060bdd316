"""The format "alpaca": `instruction`, `input` and `output`, with the `system` and `history` of LLaMA-Factory.

Source of the layout: LLaMA-Factory, data/README.md. The user's message is `instruction`, a line end, and `input`.
"""

from typing import Any

from rlcore.spi import DataError
from rlcore_text.formats.layout import Fields, Use, assistant, has_all, is_list, of_chat, user, with_system, without


def convert(row: Fields, use: Use) -> dict[str, Any] | None:
    """Convert a row of Alpaca's; see `layout`."""
    if not has_all(row, "instruction"):
        return None
    others = without(row, "instruction", "input", "output", "system", "history", "text")
    prompt = with_system(row.get("system"), [*_earlier(row.get("history")), user(_question(row))])
    if use == "preferences":
        is_pair = has_all(row, "chosen", "rejected") and "prompt" not in row
        return {**others, "prompt": prompt} if is_pair else None
    if "output" not in row or (use == "rollouts" and "prompt" in row):
        return None
    return of_chat(others, [*prompt, assistant(row["output"])], use)


def _question(row: Fields) -> str:
    """Return the text of the user's message."""
    texts = [row["instruction"], row.get("input") or ""]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"{row['instruction']!r:.40} as 'instruction' and {row.get('input')!r:.40} as 'input'; expected texts")
    return "\n".join(filter(None, texts))


def _earlier(history: object) -> list[Any]:
    """Return the messages of earlier turns, which are pairs of a question and an answer."""
    pairs: Any = history or ()
    if not is_list(pairs) or not all(is_list(pair) and len(pair) == 2 for pair in pairs):
        raise DataError(f"{history!r:.60} as 'history'; expected a list of pairs: a question and its answer")
    return [message for question, answer in pairs for message in (user(question), assistant(answer))]
