"""What a reward function is called with, and which functions are none."""

import asyncio
from typing import Any

import pytest

from rlcore.spi import ConfigError, DataError, RewardError
from rlcore_rewards.call_forms import Sample
from rlcore_rewards.reward_function import RewardFunction, load_all

SAMPLE = Sample(prompt="1+1=", completion="2", row={"prompt": "1+1=", "answer": "2", "completion": "demonstrated", 7: "odd"})
SEEN: list[Any] = []


def seen_by(function: Any) -> Any:
    """What it was called with."""
    SEEN.clear()
    assert RewardFunction.of(function, "f").say(SAMPLE).figures == {"reward": 1.0}
    return SEEN[0]


def parts(prompt: str, completion: str, row: Any) -> float:
    SEEN.append((prompt, completion, row))
    return 1.0


def fields(completion: str, answer: str, level: int = 3) -> float:
    SEEN.append((completion, answer, level))
    return 1.0


def everything(completion: str, **rest: Any) -> float:
    SEEN.append((completion, sorted(rest)))
    return 1.0


def test_a_function_is_given_what_it_names() -> None:
    assert seen_by(parts) == ("1+1=", "2", SAMPLE.row)
    assert seen_by(fields) == ("2", "2", 3)
    assert seen_by(everything) == ("2", ["answer", "prompt", "row"])


def test_what_a_function_does_to_its_arguments_stays_with_it() -> None:
    def spoil(row: Any) -> float:
        row.clear()
        return 1.0

    RewardFunction.of(spoil, "f").say(SAMPLE)
    assert SAMPLE.row["answer"] == "2"


def test_fields_without_a_default_are_needed() -> None:
    assert RewardFunction.of(fields, "f").needs == ("answer",)


def test_a_callable_object_has_the_name_of_its_class() -> None:
    class Judge:
        async def __call__(self, completion: str) -> float:
            return float(completion)

    function = RewardFunction.of(Judge(), "f")
    assert (function.name, function.is_async) == ("Judge", True)
    assert asyncio.run(function.say_later(SAMPLE)).figures == {"reward": 2.0}


def by_position(prompt: str, /, completion: str) -> float:
    return float(prompt == completion)


@pytest.mark.parametrize(("function", "names"), [(by_position, "prompt by position"), (print, ""), (max, "max")])
def test_functions_that_cannot_be_called_by_names(function: Any, names: str) -> None:
    if function is print:  # which takes anything by position, and nothing of ours
        assert RewardFunction.of(print, "print").takes == ("sep", "end", "file", "flush")
        return
    with pytest.raises(ConfigError, match=f"environment.function.path.*{names}"):
        RewardFunction.of(function, function.__name__)


def fails(completion: str) -> float:
    return int(completion) / 0


async def fails_later(completion: str) -> float:
    return fails(completion)


def ends(completion: str) -> float:
    raise SystemExit(completion)


def blames_the_row(completion: str) -> float:
    raise DataError(f"no answer to {completion}")


def test_what_a_function_raises_is_told_with_its_place() -> None:
    with pytest.raises(RewardError, match=r"'fails' raised ZeroDivisionError at test_reward_function\.py:\d+: division"):
        RewardFunction.of(fails, "f").say(SAMPLE)
    with pytest.raises(RewardError, match="'fails_later' raised ZeroDivisionError"):
        asyncio.run(RewardFunction.of(fails_later, "f").say_later(SAMPLE))
    with pytest.raises(RewardError, match="'ends' raised SystemExit.*: 2"):
        RewardFunction.of(ends, "f").say(SAMPLE)
    with pytest.raises(DataError, match="no answer to 2"):
        RewardFunction.of(blames_the_row, "f").say(SAMPLE)


def test_all_that_is_wrong_with_the_functions_of_a_recipe_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        load_all(["os:nothing", "os.path:join", "posixpath:join", "no_such_module:f"])
    assert [problem.found.split(",")[0] for problem in raised.value.problems] == [
        *("'os:nothing'", "'no_such_module:f'", "'join' more than once")
    ]
