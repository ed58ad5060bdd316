"""Fills a judge's prompt template, and reads the score in its reply."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.reading import parse_json
from rlcore.schema.types import is_number
from rlcore.spi import Message, RewardError
from rlcore_rewards.judge_config import JudgeConfig
from rlcore_text.chats.messages import thought_of
from rlcore_workers.functions import brief

FIELD = re.compile(r"\{(?:(prompt|completion|criteria)|row\[([^\]{}]+)\])\}")


def row_fields(template: str) -> list[str]:
    """The fields of a row that a template names."""
    return [match[2] for match in FIELD.finditer(template) if match[2] is not None]


def filled(
    template: str, prompt: str | Sequence[Message], completion: str, row: Mapping[str, Any], criteria: str | None = None
) -> str:
    """Fill the placeholders of a template; all else in braces stays. A chat becomes a line per message: its role, its thought,
    its content with [image] for each image, and its calls as JSON."""
    shown = prompt if isinstance(prompt, str) else "\n".join(f"{one['role']}: {_text_of(one)}" for one in prompt)
    parts = {"prompt": shown, "completion": completion, "criteria": "{criteria}" if criteria is None else criteria}
    return FIELD.sub(lambda match: parts[match[1]] if match[1] else str(row[match[2]]), template)


def _text_of(message: Message) -> str:
    """Return a message as one text: thought, content and calls."""
    content: Any = message["content"]
    if isinstance(content, list | tuple):
        content = "".join(part["text"] if part["type"] == "text" else "[image]" for part in content)
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    return "\n".join(part for part in (thought_of(message), content, *calls) if part)


def score_of(answer: str, config: JudgeConfig) -> float:
    """The score that a judge gives. RewardError where there is none, or one out of range."""
    found = _field(answer, config.score_field) if config.score_field is not None else _last_match(answer, config.score_pattern)
    low, high = config.score_range
    if found is None or not low <= found <= high:
        what = "no score" if found is None else f"the score {found:g}"
        where = f"the field {config.score_field!r}" if config.score_field is not None else f"{config.score_pattern!r}"
        raise RewardError(f"the judge gave {what} in {answer!r:.300}; expected one from {low:g} to {high:g} by {where}")
    return found


def _last_match(answer: str, pattern: str) -> float | None:
    found = re.findall(pattern, answer)
    try:
        return float(found[-1]) if found else None
    except ValueError:
        return None


def _field(answer: str, name: str) -> float | None:
    """A number in the JSON object between the first and the last brace: judges like to write around it."""
    try:
        value = parse_json(answer[answer.index("{") : answer.rindex("}") + 1])[name]
    except (ValueError, KeyError, TypeError):
        return None
    return float(value) if is_number(value) else None


def pattern_fault(pattern: str) -> str | None:
    """The fault of a pattern for scores, or None."""
    try:
        num_groups = re.compile(pattern).groups
    except re.error as error:
        return f"{brief(pattern)}, which is no regular expression: {error}"
    return None if num_groups == 1 else f"{brief(pattern)}, with {num_groups} groups"
