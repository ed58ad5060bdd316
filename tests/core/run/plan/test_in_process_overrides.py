"""What a program hands over stands in for the recipe's own."""

from pathlib import Path
from typing import Any

import pytest

from rlcore.config.load import Origin, raw_from
from rlcore.registry.discovery import Registry
from rlcore.rewards.environment import FunctionBackend
from rlcore.run.plan.in_process_overrides import InProcessOverrides
from rlcore.run.plan.prepare import prepare
from rlcore.spi import ConfigError, PluginError
from rlcore.testing.fakes import fake_registry
from rlcore.testing.fakes.environment import FakeEnvironment

ORIGIN = Origin(label="the test", directory=Path())
RECIPE: dict[str, Any] = {
    "model": {"path": "none"},
    "algorithm": {"name": "fake"},
    "environment": {"name": "fake", "function": {"path": "gone.py:f", "weights": {"score": 2.0}}},
    "data": {"train": {"source": "jsonl", "path": "gone.jsonl", "limit": 1}},
}
ROWS = [{"prompt": "a"}, {"prompt": "b"}]


def score(completion: str) -> float:
    return float(len(completion))


class Agents:
    async def run(self, row: Any, seed: int, session: Any) -> None: ...

    def rows(self, split: str) -> None: ...


def given(**options: Any) -> InProcessOverrides:
    return InProcessOverrides(origin=ORIGIN, **options)


def test_a_function_and_rows_replace_those_of_the_recipe() -> None:
    plan = prepare(RECIPE, registry=fake_registry(), given=given(reward=(score,), rows={"train": ROWS}))
    assert isinstance(plan.environment, FunctionBackend)
    assert (plan.recipe.data.train.source, plan.recipe.data.train.path, plan.recipe.data.train.limit) == ("python", None, 1)
    assert plan.given_rows["train"] is ROWS
    assert "[environment.function.weights]" in plan.resolved
    assert "gone" not in plan.resolved
    assert RECIPE["environment"]["name"] == "fake"


def test_a_recipe_of_the_run_directory_needs_what_was_given() -> None:
    recipe = {**RECIPE, "environment": {"name": "function"}}
    with pytest.raises(ConfigError, match=r"environment\.function\.path.*rlcore\.train"):
        prepare(recipe, registry=fake_registry())


@pytest.mark.parametrize(("environment", "runs_agents"), [(FakeEnvironment.__new__(FakeEnvironment), False), (Agents(), True)])
def test_an_environment_is_used_as_it_is(environment: Any, runs_agents: bool) -> None:
    plan = prepare({**RECIPE, "data": {}}, registry=fake_registry(), given=given(environment=environment))
    assert plan.environment is environment
    assert plan.runs_agents is runs_agents
    assert plan.recipe.environment is not None
    assert plan.recipe.environment.name == "python"


def test_what_is_no_environment_is_refused() -> None:
    with pytest.raises(PluginError, match="environment 'python'.*"):
        prepare({**RECIPE, "data": {}}, registry=fake_registry(), given=given(environment=object()))
    with pytest.raises(ConfigError, match="reward and environment"):
        given(environment=Agents(), reward=(score,))


def test_what_is_no_table_is_left_to_the_converter() -> None:
    raw = given(reward=(score,), rows={"train": ROWS}).in_place(raw_from({"environment": 3, "data": 4}, ()))
    assert raw.values == {"environment": 3, "data": 4}


def test_without_anything_the_recipe_stays_as_it_is() -> None:
    raw = raw_from(RECIPE, ())
    assert given().in_place(raw).values == raw.values
    registry: Registry = fake_registry()
    assert given().described(registry) is registry
