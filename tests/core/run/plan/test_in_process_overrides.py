"""What a program hands over stands in for the recipe's own."""

import re
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from rlcore.config.load import Origin, raw_from
from rlcore.registry.discovery import Entry, Registry
from rlcore.run.plan.in_process_overrides import InProcessOverrides
from rlcore.run.plan.prepare import prepare
from rlcore.spi import ConfigError, EnvironmentContext, PluginError
from rlcore.testing.fakes import FAKE_ENVIRONMENT, fake_registry
from rlcore.testing.fakes.environment import FakeEnvironment

ORIGIN = Origin(label="the test", directory=Path())
RECIPE: dict[str, Any] = {
    "model": {"path": "none"},
    "algorithm": {"name": "fake"},
    "environment": {"name": "fake"},
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


class Rewards(FakeEnvironment):
    def __init__(self, context: EnvironmentContext, config: Any) -> None:
        super().__init__(context, config)
        self.functions = context.reward_functions


def with_rewards(*able: str) -> Registry:
    """The fakes, with an environment `function` that declares these capabilities."""
    provider = evolve(FAKE_ENVIRONMENT, name="function", backend=f"{__name__}:Rewards", capabilities=able)
    entry = Entry(role="environment", name="function", distribution="in-process", version="0").holding(provider)
    return evolve(fake_registry(), entries=(*fake_registry().entries, entry))


def test_a_function_and_rows_replace_those_of_the_recipe() -> None:
    recipe = {**RECIPE, "environment": {"name": "fake", "function": {"path": "gone.py:f", "num_turns": 2}}}
    plan = prepare(recipe, registry=with_rewards("reward_functions"), given=given(reward=(score,), rows={"train": ROWS}))
    assert plan.environment.functions == (score,)  # type: ignore[union-attr]
    assert (plan.recipe.data.train.source, plan.recipe.data.train.path, plan.recipe.data.train.limit) == ("python", None, 1)
    assert plan.given_rows["train"] is ROWS
    assert "num_turns = 2\n" in plan.resolved
    assert "gone" not in plan.resolved
    assert recipe["environment"]["name"] == "fake"


def test_a_function_needs_an_environment_that_takes_it() -> None:
    handed = given(reward=(score,), rows={"train": ROWS})
    with pytest.raises(PluginError, match=re.escape("Run: pip install 'rlcore[rewards]'")):
        prepare(RECIPE, registry=fake_registry(), given=handed)
    with pytest.raises(PluginError, match="reward_functions"):
        prepare(RECIPE, registry=with_rewards(), given=handed)


def test_a_resumed_run_needs_the_environment_that_was_given() -> None:
    with pytest.raises(ConfigError, match=r"environment\.name.*rlcore\.train"):
        prepare({**RECIPE, "environment": {"name": "python"}, "data": {}}, registry=fake_registry())


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
