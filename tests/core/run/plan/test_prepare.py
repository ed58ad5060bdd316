"""From a recipe file to a plan: in which order, and with what allocated."""

from collections.abc import Callable

import pytest

from rlcore.registry.discovery import Registry
from rlcore.run.plan import prepare as prepare_module
from rlcore.run.plan.prepare import prepare, require_device
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import ConfigError
from rlcore.testing.fakes import fake_registry
from rlcore.testing.fakes.environment import FakeEnvironment

Prepare = Callable[..., RunPlan]


def test_only_the_environment_is_built(
    prepared: Prepare, registry_with: Callable[..., Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        pytest.fail("a backend is built")

    backends = {role: type("Heavy", (), {"__init__": refuse}) for role in ("trainer", "generator")}
    plan = prepared(registry=registry_with(**backends))
    assert isinstance(plan.environment, FakeEnvironment)
    assert (plan.channel, plan.ranks_per_generator) == ("in_process", 1)


def test_without_an_environment_none_is_built_and_nothing_generates(tmp_path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'model.path = "none"\n[algorithm]\nname = "fake"\nfake.source = "demonstrations"\n[data.train]\n'
        f'source = "jsonl"\npath = "{data}"\n'
    )
    plan = prepare(recipe, registry=fake_registry())
    assert plan.environment is None
    assert plan.channel is None
    assert set(plan.chosen) == {"algorithm", "trainer", "execution"}


def test_who_evaluates_measures_whatever_the_recipe_says_of_a_training(tmp_path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'model.path = "none"\nalgorithm.name = "fake"\nenvironment.name = "fake"\n[data.evaluation]\n'
        "[evaluation]\nevery_n_steps = 0\nat_start = false\nat_end = false\n"
    )
    assert not prepare(recipe, registry=fake_registry()).recipe.evaluates
    assert prepare(recipe, registry=fake_registry(), evaluating=True).recipe.evaluates


def test_a_recipe_that_was_written_without_its_secret_is_not_run(prepared: Prepare) -> None:
    with pytest.raises(ConfigError, match=r"environment\.MY_TOKEN: .*secret"):
        prepared("checkpoint_evaluation.command=['true']", "checkpoint_evaluation.environment.MY_TOKEN='***'")


@pytest.mark.parametrize(
    ("written", "there", "device"),
    [("auto", "cpu", "cpu"), ("auto", "cuda", "cuda"), ("cpu", "cuda", "cpu"), ("cuda", "cpu", "cuda")],
)
def test_the_device_is_the_recipes_or_the_one_that_is_there(
    prepared: Prepare, monkeypatch: pytest.MonkeyPatch, written: str, there: str, device: str
) -> None:
    monkeypatch.setattr(prepare_module, "detect_device", lambda: there)
    plan = prepared(f"run.device={written}", "model.dtype=float32")
    assert plan.device == device
    if (device, there) != ("cuda", "cpu"):
        require_device(plan)
        return
    with pytest.raises(ConfigError) as raised:
        require_device(plan)
    (problem,) = raised.value.problems
    assert problem.path == "run.device"
