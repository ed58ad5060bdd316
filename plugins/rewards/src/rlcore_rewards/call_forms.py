"""The forms in which libraries call a reward function: the arguments of a call, and the value that it returns.

The names of a function's arguments tell its form: `completions` TRL's, `solution_str` verl's, `response` and `ground_truth`
NeMo-RL's, and others rlcore's own.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from attrs import field, frozen

from rlcore.schema.types import is_number
from rlcore.spi import Message, RewardError
from rlcore.spi.arrays import Int32Array
from rlcore_rewards.score import FAILURE, REWARD, SUCCESS
from rlcore_workers.functions import brief

_NO_TOKENS = np.zeros(0, np.int32)


@frozen(kw_only=True)
class Sample:
    """One answer of the policy to one row."""

    prompt: str | Sequence[Message]
    """The row's prompt."""
    completion: str
    row: Mapping[str, Any]
    tokens: Int32Array = field(default=_NO_TOKENS, eq=False)
    """int32 [length]: the answer, the stop token included."""


class CallForm(Protocol):
    """A form of calls."""

    @property
    def name(self) -> str:
        """The library whose form it is."""

    @property
    def marks(self) -> frozenset[str]:
        """The names of arguments that tell the form."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The arguments that do not come from the row."""

    def of_sample(self, sample: Sample) -> dict[str, Any]:
        """Return the arguments `parts`."""

    def of_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that come from the row; those that the row lacks are absent."""

    def result(self, name: str, value: Any) -> Any:
        """Return the value of the function `name`: a number, a mapping, or None for no reward. RewardError for others."""


@frozen
class OwnForm:
    """rlcore's form: f(prompt, completion, row, FIELD…) for one sample."""

    name: str = "rlcore"
    marks: frozenset[str] = frozenset()
    parts: tuple[str, ...] = ("prompt", "completion", "row")

    def of_sample(self, sample: Sample) -> dict[str, Any]:
        """See CallForm."""
        return {"prompt": sample.prompt, "completion": sample.completion, "row": sample.row}

    def of_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """See CallForm."""
        return {name: value for name, value in row.items() if isinstance(name, str)}

    def result(self, name: str, value: Any) -> Any:
        """See CallForm."""
        if value is None:
            raise RewardError(
                f"the reward function {name!r} returned None; expected a finite number, or a mapping of names to such"
            )
        return value


@frozen
class TrlForm:
    """TRL's form: f(prompts, completions, completion_ids, COLUMN…) for a batch, here of one sample.

    A completion is a text, or a list with the assistant's message where the prompt is messages. The value is a list with a
    number, or with None where the function does not apply.
    """

    name: str = "TRL"
    marks: frozenset[str] = frozenset({"completions"})
    parts: tuple[str, ...] = ("prompts", "completions", "completion_ids")

    def of_sample(self, sample: Sample) -> dict[str, Any]:
        """See CallForm."""
        is_chat = not isinstance(sample.prompt, str)
        completion: Any = [{"role": "assistant", "content": sample.completion}] if is_chat else sample.completion
        return {"prompts": [sample.prompt], "completions": [completion], "completion_ids": [sample.tokens.tolist()]}

    def of_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """See CallForm."""
        left_out = ("prompt", "completion", "completion_ids")
        return {name: [value] for name, value in row.items() if isinstance(name, str) and name not in left_out}

    def result(self, name: str, value: Any) -> Any:
        """See CallForm."""
        rewards = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(rewards, list | tuple):
            raise RewardError(
                f"the reward function {name!r} returned {brief(value)}; expected a list with a reward for each completion"
            )
        if len(rewards) != 1:
            raise RewardError(
                f"the reward function {name!r} returned a list of {len(rewards)} rewards for 1 completion; expected one reward "
                "for each completion"
            )
        return rewards[0]


@frozen
class VerlForm:
    """verl's form: f(data_source, solution_str, ground_truth, extra_info). The value is a number, or a mapping with `score`."""

    name: str = "verl"
    marks: frozenset[str] = frozenset({"solution_str"})
    parts: tuple[str, ...] = ("solution_str",)

    def of_sample(self, sample: Sample) -> dict[str, Any]:
        """See CallForm."""
        return {"solution_str": sample.completion}

    def of_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """See CallForm."""
        source = {"data_source": row["data_source"]} if "data_source" in row else {}
        return {"extra_info": row.get("extra_info") or {}, **source, **_ground_truth(row)}

    def result(self, name: str, value: Any) -> Any:
        """See CallForm. Of a mapping's other values, numbers become metrics."""
        if not isinstance(value, Mapping):
            return OwnForm().result(name, value)
        if "score" not in value or REWARD in value:
            raise RewardError(f"the reward function {name!r} returned {brief(value)}; expected a mapping with 'score'")
        others = {key: one for key, one in value.items() if key not in ("score", SUCCESS, FAILURE) and _is_figure(one)}
        return {**others, REWARD: value["score"]}


@frozen
class NemoRlForm:
    """NeMo-RL's form: f(ground_truth, response). The value is a pair: a number, and whether the answer is right, or None."""

    name: str = "NeMo-RL"
    marks: frozenset[str] = frozenset({"response", "ground_truth"})
    parts: tuple[str, ...] = ("response",)

    def of_sample(self, sample: Sample) -> dict[str, Any]:
        """See CallForm."""
        return {"response": sample.completion}

    def of_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """See CallForm."""
        return _ground_truth(row)

    def result(self, name: str, value: Any) -> Any:
        """See CallForm."""
        if not isinstance(value, tuple) or len(value) != 2:
            raise RewardError(
                f"the reward function {name!r} returned {brief(value)}; expected a pair: the reward, and whether it is right"
            )
        return {REWARD: value[0], SUCCESS: value[1]}


FORMS: tuple[CallForm, ...] = (TrlForm(), VerlForm(), NemoRlForm())
"""The forms of other libraries."""
OWN: CallForm = OwnForm()


def forms_of(names: Collection[str]) -> list[CallForm]:
    """Return the forms that a function's arguments tell; an argument of rlcore's own tells that form alone."""
    if {"completion", "row"} & set(names):
        return [OWN]
    return [form for form in FORMS if form.marks <= set(names)] or [OWN]


def _ground_truth(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the argument `ground_truth`: of verl's column `reward_model`, or the field `ground_truth` or `answer`."""
    rewarded = row.get("reward_model")
    for place, name in ((rewarded, "ground_truth"), (row, "ground_truth"), (row, "answer")):
        if isinstance(place, Mapping) and name in place:
            return {"ground_truth": place[name]}
    return {}


def _is_figure(value: object) -> bool:
    return is_number(value) or isinstance(value, bool | np.bool_)
