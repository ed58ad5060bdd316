"""Rubrics: criteria with weights, which a judge scores one by one, in one request or in several."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from rlcore.reading import parse_json
from rlcore.schema.types import is_number
from rlcore.spi import DataError, RewardError, Row
from rlcore_rewards.judge_config import JudgeConfig

CRITERIA = "{criteria}"
"""The placeholder of a judge's prompt for the criteria that it is asked about."""
_FIELDS = ("criterion", "weight")


@frozen
class Criterion:
    """One line of a rubric."""

    name: str
    text: str
    weight: float


def criteria_of(row: Row, config: JudgeConfig) -> list[Criterion]:
    """The criteria of the recipe, or of a row's field; of the latter the names are their numbers from 1 on. DataError where the
    field is no rubric."""
    if config.criteria_field is None:
        return [Criterion(name, one.text, one.weight) for name, one in config.criteria.items()]
    found: Any = row.get(config.criteria_field)
    if isinstance(found, str | bytes | Mapping) or not isinstance(found, Sequence) or not found:
        what = f"{found!r:.60} as {config.criteria_field!r}" if config.criteria_field in row else "no such field"
        raise DataError(
            f'found {what}; expected a list of {{"criterion": text, "weight": number above 0}} '
            "(environment.judge.criteria_field)"
        )
    return [_criterion(one, number) for number, one in enumerate(found, start=1)]


def _criterion(one: Any, number: int) -> Criterion:
    text, weight = (one.get(name) for name in _FIELDS) if isinstance(one, Mapping) else (None, None)
    weight = 1.0 if weight is None else weight
    if not isinstance(text, str) or not text.strip() or not is_number(weight) or weight <= 0:
        raise DataError(f"found {one!r:.80} as criterion {number}; expected a text, and a weight above 0")
    return Criterion(str(number), text, float(weight))


def listed(criteria: Sequence[Criterion]) -> str:
    """The text of criteria in a prompt: a line of each, behind its name where there are several."""
    return criteria[0].text if len(criteria) == 1 else "\n".join(f"{one.name}: {one.text}" for one in criteria)


def scores_of(answer: str, criteria: Sequence[Criterion], config: JudgeConfig) -> list[float]:
    """The scores of the JSON object in a judge's answer, by the criteria's names. RewardError where one is missing or out of
    range."""
    low, high = config.score_range
    try:
        found: Any = parse_json(answer[answer.index("{") : answer.rindex("}") + 1])
    except ValueError:
        found = None
    scores: list[Any] = [found.get(one.name) if isinstance(found, dict) else None for one in criteria]
    wrong = [one.name for one, score in zip(criteria, scores, strict=True) if not is_number(score) or not low <= score <= high]
    if wrong:
        raise RewardError(
            f"the judge gave no score from {low:g} to {high:g} of {', '.join(map(repr, wrong))} in {answer!r:.300}; "
            f"expected a JSON object such as {json.dumps({one.name: high for one in criteria[:2]})}"
        )
    return [float(score) for score in scores]


def weighed(scores: Sequence[float], criteria: Sequence[Criterion], config: JudgeConfig) -> dict[str, float]:
    """Each criterion's part w_k s_k / Σ w of the reward, s_k its score from 0 to 1 (explicit aggregation, arXiv:2507.17746,
    equation 1)."""
    low, high = config.score_range
    total = sum(one.weight for one in criteria)
    return {one.name: one.weight / total * (score - low) / (high - low) for one, score in zip(criteria, scores, strict=True)}
