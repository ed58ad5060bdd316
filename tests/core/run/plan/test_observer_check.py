"""Keys of a recipe whose package is not installed are refused with the line that installs it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve

from rlcore.config.checkpoint_evaluation import CheckpointEvaluationConfig
from rlcore.run.plan import checks
from rlcore.run.plan.checks import KEYS, observer_problems
from rlcore.spi import Problem

FOUND = Problem(path="checkpoint", found="nothing", expected="something")


class Entry:
    """An installed observer, whose check finds a problem."""

    def __init__(self, name: str, config: type | None = None) -> None:
        self.name = name
        self.provider = SimpleNamespace(config=config)

    def check(self, recipe: object) -> tuple[Problem, ...]:
        return (FOUND,)


@pytest.fixture
def recipes(prepared: Callable[..., Any]) -> dict[str, Any]:
    """A recipe that sets each key, and one that sets none."""
    none = prepared().recipe
    exporting = evolve(none.checkpoint, export="hf", model_card=False)
    return {
        "": none,
        "checkpoint_evaluation": evolve(none, checkpoint_evaluation=CheckpointEvaluationConfig(command=("sh",))),
        "model_card": evolve(none, checkpoint=evolve(exporting, model_card=True)),
        "push_to_hub": evolve(none, checkpoint=evolve(exporting, push_to_hub="ann/sums")),
    }


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    found = [Entry(name) for name in names]
    monkeypatch.setattr(checks, "loop_observers", lambda unwanted: tuple(one for one in found if one.name not in unwanted))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("checkpoint_evaluation", "pip install 'rlcore[serve]'"),
        ("model_card", "pip install 'rlcore[hub]'. Or set checkpoint.model_card = false"),
        ("push_to_hub", "pip install 'rlcore[hub]'"),
    ],
)
def test_a_key_whose_package_is_missing_is_refused(
    recipes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str, line: str
) -> None:
    install(monkeypatch)
    (problem,) = observer_problems(SimpleNamespace(recipe=recipes[name]))
    assert (problem.path, problem.remedy) == (KEYS[name][0], f"Run: {line}")
    install(monkeypatch, *KEYS)
    assert list(observer_problems(SimpleNamespace(recipe=recipes[name]))) == [FOUND]


def test_an_observer_is_asked_only_where_its_key_is_set_and_one_without_a_key_always(
    recipes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, *KEYS)
    assert list(observer_problems(SimpleNamespace(recipe=recipes[""]))) == []
    install(monkeypatch, "disk", *KEYS)
    assert list(observer_problems(SimpleNamespace(recipe=recipes[""]))) == [FOUND]


def test_an_observer_with_a_table_is_asked_only_where_the_recipe_has_the_table(
    recipes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "loop_observers", lambda _: (Entry("disk", CheckpointEvaluationConfig),))
    assert list(observer_problems(SimpleNamespace(recipe=recipes[""]))) == []
    with_table = evolve(recipes[""], tables={"disk": CheckpointEvaluationConfig(command=("sh",))})
    assert list(observer_problems(SimpleNamespace(recipe=with_table))) == [FOUND]


def test_a_disabled_observer_is_said_to_be_disabled(recipes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.setattr(checks, "is_disabled", lambda name: True)
    (problem,) = observer_problems(SimpleNamespace(recipe=recipes["push_to_hub"]))
    assert problem.remedy == "RLCORE_DISABLE_PLUGINS disables it: take its name out"
