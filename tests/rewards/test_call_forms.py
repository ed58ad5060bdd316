"""Reward functions in the forms of TRL, verl and NeMo-RL, and what TRL itself computes with the same functions."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.spi import ConfigError, DataError, EnvironmentContext, FinishReason, Note, RewardError, StepResult, Turn
from rlcore_rewards.config import FunctionConfig
from rlcore_rewards.environment import FunctionBackend, check
from rlcore_rewards.reward_function import RewardFunction

from . import trl_functions  # type: ignore[import-not-found]

FROZEN = json.loads((Path(__file__).parent / "trl_rewards.json").read_text())
"""The batch of `trl_functions.py`, as TRL's GRPOTrainer computes it: rewards of each function, and their weighted sums."""


def turn(text: str, tokens: Any = (1, 2)) -> Turn:
    return Turn(text=text, tokens=np.asarray(tokens, np.int32), finish_reason=FinishReason.STOP)


def step(*functions: Any, row: Any, text: str, tokens: Any = (1, 2), **options: Any) -> StepResult:
    backend = FunctionBackend(EnvironmentContext(seed=0, reward_functions=functions), FunctionConfig(**options))
    return asyncio.run(_step(backend, row, turn(text, tokens)))


async def _step(backend: FunctionBackend, row: Any, one: Turn) -> StepResult:
    return await backend.step((await backend.reset(row, 0)).state, one)


@pytest.mark.parametrize("form", ["text", "chat"])
def test_a_batch_has_the_rewards_that_trl_computes(form: str) -> None:
    frozen, batch = FROZEN[form], trl_functions.BATCHES[form]
    weights = dict(zip((function.__name__ for function in trl_functions.FUNCTIONS), trl_functions.WEIGHTS, strict=True))
    for row, text, tokens, rewards, total in zip(*batch, frozen["rewards"], frozen["totals"], strict=True):
        found = step(*trl_functions.FUNCTIONS, row=row, text=text, tokens=tokens, weights=weights)
        expected = {name: reward for name, reward in zip(weights, rewards, strict=True) if reward is not None}
        if not expected:
            assert found.failure is not None
            assert not found.failure.is_trained
            continue
        assert found.failure is None
        assert found.reward == pytest.approx(total, abs=1e-6)
        assert dict(found.metrics) == pytest.approx(expected, abs=1e-6)


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
    figures = {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth, "pred": solution_str}
    return {**figures, "index": extra_info["index"], "known": float(data_source == "own/sums")}


def plain_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **options: Any) -> float:
    assert not options
    return 0.25 if extra_info == {} else 0.5


VERL = {
    "prompt": "2+3?",
    "data_source": "own/sums",
    "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {"index": 7},
}


def test_a_function_of_verls_gets_its_columns_and_its_figures_are_metrics() -> None:
    right, wrong = (step(score, row=VERL, text=text) for text in ("5", "6"))
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert right.metrics == {"acc": 1.0, "index": 7.0, "known": 1.0}
    assert step(plain_score, row={"prompt": "?", "data_source": "a", "answer": "5"}, text="5").reward == 0.25
    with pytest.raises(DataError, match="data_source, ground_truth"):
        step(score, row={"prompt": "?"}, text="5")
    for value in ({"reward": 1.0}, {"score": 1.0, "reward": 2.0}, {"score": None}, None, "1"):
        with pytest.raises(RewardError, match="'f'"):
            RewardFunction.of(_returning("solution_str", value), "f").say(_sample())


def exact(ground_truth: str, response: str, tag: str = "answer") -> tuple[float, bool]:
    return (0.5, True) if response == f"<{tag}>{ground_truth}</{tag}>" else (0.0, False)


def test_a_function_of_nemo_rls_says_whether_the_answer_is_right() -> None:
    row = {"prompt": "?", "ground_truth": "5"}
    right, wrong = (step(exact, row=row, text=text) for text in ("<answer>5</answer>", "5"))
    assert [(one.reward, one.success) for one in (right, wrong)] == [(0.5, True), (0.0, False)]
    with pytest.raises(RewardError, match="a pair"):
        RewardFunction.of(_returning("response, ground_truth", 1.0), "f").say(_sample())


@pytest.mark.parametrize("value", [[1.0, 2.0], [], 1.0, None, ["1"], [float("nan")], {"reward": 1.0}])
def test_a_function_of_trls_returns_one_number_for_each_completion(value: Any) -> None:
    with pytest.raises(RewardError, match="'f'"):
        RewardFunction.of(_returning("completions, **kwargs", value), "f").say(_sample())


@pytest.mark.parametrize("value", [[0.5], (0.5,), np.array([0.5])])
def test_a_list_may_be_an_array(value: Any) -> None:
    assert RewardFunction.of(_returning("completions, **kwargs", value), "f").say(_sample()).figures == {"reward": 0.5}


def test_arguments_of_two_forms_are_refused_and_those_of_rlcores_own_decide() -> None:
    with pytest.raises(ConfigError, match="TRL and verl"):
        RewardFunction.of(_returning("completions, solution_str", 1.0), "f")
    own = RewardFunction.of(_returning("completion, completions=0, solution_str=0", 1.0), "f")
    assert (own.form.name, own.say(_sample()).figures) == ("rlcore", {"reward": 1.0})


def test_check_names_the_form(tmp_path: Path) -> None:
    signatures = ("f(completions, answer, **kwargs)", "g(data_source, solution_str, ground_truth)", "h(completion)")
    (tmp_path / "forms.py").write_text("".join(f"def {one}: ...\n" for one in signatures))
    found = check(None, FunctionConfig(path=tuple(f"{tmp_path}/forms.py:{name}" for name in "fgh")))
    assert all(isinstance(one, Note) for one in found)
    assert [str(one).split("the form of ")[1] for one in found] == [
        "TRL: completions, answer",
        "verl: data_source, solution_str, ground_truth",
    ]


def _returning(arguments: str, value: Any) -> Any:
    scope: dict[str, Any] = {"value": value}
    exec(f"def f({arguments}):\n    return value\n", scope)
    return scope["f"]


def _sample() -> Any:
    from rlcore_rewards.call_forms import Sample

    return Sample(prompt="?", completion="5", row={"prompt": "?", "answer": "5"})
