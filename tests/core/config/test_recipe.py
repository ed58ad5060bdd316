"""What follows from a recipe's sections."""

import pytest

from rlcore.config.data import DataConfig, DatasetConfig
from rlcore.config.model import ModelConfig
from rlcore.config.plugin_choice import NamedPluginChoice
from rlcore.config.recipe import EvaluationConfig, Recipe, RolloutConfig


@pytest.mark.parametrize(("top_k", "top_p", "truncates"), [(0, 1.0, False), (1, 1.0, True), (0, 0.99, True), (5, 0.5, True)])
def test_sampling_truncates_where_a_token_may_be_left_out(top_k: int, top_p: float, truncates: bool) -> None:
    assert RolloutConfig(top_k=top_k, top_p=top_p).truncates == truncates


def test_the_longest_sequence_is_the_longest_prompt_with_the_longest_response() -> None:
    assert RolloutConfig(max_prompt_tokens=3, max_response_tokens=4).max_sequence_length == 7


HELD_OUT = DataConfig(evaluation=DatasetConfig())
NEVER = EvaluationConfig(every_n_steps=0, at_start=False, at_end=False)


@pytest.mark.parametrize(
    ("environment", "data", "evaluation", "evaluates"),
    [
        ("env", HELD_OUT, EvaluationConfig(every_n_steps=3, at_start=False, at_end=False), True),
        ("env", HELD_OUT, EvaluationConfig(every_n_steps=0, at_start=True, at_end=False), True),
        ("env", HELD_OUT, EvaluationConfig(every_n_steps=0, at_start=False, at_end=True), True),
        ("env", HELD_OUT, NEVER, False),
        ("env", DataConfig(), EvaluationConfig(), False),
        (None, HELD_OUT, EvaluationConfig(), False),
    ],
)
def test_a_run_evaluates_where_it_has_something_to_measure_and_a_time_for_it(
    environment: str | None, data: DataConfig, evaluation: EvaluationConfig, evaluates: bool
) -> None:
    recipe = Recipe(
        model=ModelConfig(path="none"),
        algorithm=NamedPluginChoice(name="alg"),
        environment=None if environment is None else NamedPluginChoice(name=environment),
        data=data,
        evaluation=evaluation,
    )
    assert recipe.evaluates == evaluates
