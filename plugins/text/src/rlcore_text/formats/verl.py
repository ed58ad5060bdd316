"""The format "verl": `prompt` as messages, with `data_source`, `reward_model.ground_truth` and `extra_info`.

Source of the layout: verl, docs/preparation/prepare_data.rst, and verl/utils/dataset for supervised rows.
"""

from collections.abc import Mapping
from typing import Any

from rlcore_text.formats.layout import Fields, Use, assistant, has_all, is_list, user


def convert(row: Fields, use: Use) -> dict[str, Any] | None:
    """Convert a row of verl's; see `layout`. `answer` becomes reward_model.ground_truth unless the row has an `answer`."""
    if use == "demonstrations":
        return _supervised(row)
    if use == "preferences" or not is_of_rewards(row):
        return None
    rewarded: Any = row.get("reward_model")
    truth = {"answer": rewarded["ground_truth"]} if isinstance(rewarded, Mapping) and "ground_truth" in rewarded else {}
    return {**truth, **row}


def is_of_rewards(row: Fields) -> bool:
    """Return whether a row has the layout for training by rewards."""
    return is_list(row.get("prompt")) and "data_source" in row and isinstance(row.get("reward_model"), Mapping)


def _supervised(row: Fields) -> dict[str, Any] | None:
    """Return a row to learn: `messages`, or the question and the answer in `extra_info`."""
    if has_all(row, "messages") and "prompt" not in row:
        return dict(row)
    told: Any = row.get("extra_info")
    if not is_of_rewards(row) or not isinstance(told, Mapping) or not has_all(told, "question", "answer"):
        return None
    others = {name: value for name, value in row.items() if name != "prompt"}
    return {**others, "messages": [user(told["question"]), assistant(told["answer"])]}
